r"""Several processes of one machine: started together, ended together.

One process a device is the rule of data-parallel training. Somebody has to start them, pass signals on to
them, notice when one of them is gone, and see to it that none is left behind. That is the process that the
user started: it trains nothing, so nothing that happens in the training can keep it from doing this. On
several machines `torchrun` plays the part.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

__all__ = ["Ended", "RankError", "is_rank", "meeting_point", "report", "report_error", "run_ranks"]

PORT = "POSTIL_PORT"
STARTED_BY = "POSTIL_STARTED_BY"

# What one rank reports, others mostly find at the same moment, and are given this long to say it too. Who
# died without a word leaves them nothing to wait for.
GRACE = 5.0


class RankError(RuntimeError):
    r"""One of several processes was lost or failed; the message names it."""


@dataclass(frozen=True)
class Ended:
    r"""How a process ended: its exit code, negative for a signal, and what it reported before."""

    rank: int
    code: int
    report: dict[str, Any] | None
    stopped: bool = False

    @property
    def well(self) -> bool:
        r"""True if the process had done all it was started for."""
        return self.report is not None and "error" not in self.report

    def __str__(self) -> str:
        if self.code >= 0:
            return f"rank {self.rank} ended early, with exit code {self.code}"
        name = signal.Signals(-self.code).name
        hint = "; the system does so when memory runs out" if self.code == -signal.SIGKILL else ""
        return f"rank {self.rank} was killed by {name}{hint}"


def is_rank() -> bool:
    r"""Return whether this process was started, by `run_ranks` or `torchrun`, as one of several."""
    return "LOCAL_RANK" in os.environ


# ## In each of the processes
def meeting_point(timeout: timedelta) -> Store | None:
    r"""Connect to the store that `run_ranks` keeps; `None` in a process that it did not start."""
    port = os.environ.get(PORT)
    return TCPStore("127.0.0.1", int(port), None, False, timeout) if port else None


def report(value: Mapping[str, Any], store: Store | None) -> None:
    r"""Leave word with the process that started this one."""
    if store is not None:
        store.set(f"report/{os.environ['LOCAL_RANK']}", json.dumps(dict(value)))


def report_error(error: BaseException, store: Store | None) -> None:
    r"""Leave word of an error with the process that started this one."""
    text = str(error.code) if isinstance(error, SystemExit) else str(error)
    report({"error": {"kind": type(error).__name__, "text": text}}, store)


# ## In the process that starts them
def run_ranks(command: Sequence[str], count: int) -> list[Ended]:
    r"""Run `command` in `count` processes; return how they ended, in that order, when all have.

    The first SIGTERM and SIGINT, and each one after it, is passed on to all. When one reports an error, the
    others have a few seconds to do so too; when one ends without a report, they have none. Then they are
    killed, stopped ones too.
    """
    store, port = _open_meeting_point()
    running = [
        subprocess.Popen(
            list(command),
            env=_environment(rank, count, port),
            stdin=subprocess.DEVNULL,
            # Ctrl-C goes to every process of a terminal's group. In a session of their own they get it once,
            # from here, and not a second time, which would mean "at once".
            start_new_session=True,
        )
        for rank in range(count)
    ]
    try:
        with _passing_signals_on(running):
            return _wait(running, store)
    finally:
        for process in running:
            process.kill()
            process.wait()


# The meeting point of PyTorch listens on every interface of the machine unless it is handed a socket. Here
# nothing outside this machine can reach it.
def _open_meeting_point() -> tuple[Store, int]:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        None,
        True,
        timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


# Each process would otherwise start as many threads as there are cores, and they would fight for them.
def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    threads = str(max(1, (os.cpu_count() or 1) // count))
    defaults = {
        "OMP_NUM_THREADS": threads,
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        # PyTorch prints a page of addresses for every broken connection. What it means is said in words.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return {
        **defaults,
        **os.environ,
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(count),
        PORT: str(port),
        STARTED_BY: str(os.getpid()),
    }


@contextmanager
def _passing_signals_on(running: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in running:
            process.send_signal(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    for each, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(each, pass_on)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)


def _wait(running: list[subprocess.Popen[bytes]], store: Store) -> list[Ended]:
    left = dict(enumerate(running))
    ended: list[Ended] = []
    deadline = float("inf")
    while left:
        late = time.monotonic() > deadline
        for rank, process in list(left.items()):
            if late:
                process.kill()
                process.wait()
            code = process.poll()
            if code is None:
                continue
            del left[rank]
            ended.append(Ended(rank, code, _report_of(rank, store), stopped=late))
            if not ended[-1].well:
                grace = GRACE if ended[-1].report else 0.0
                deadline = min(deadline, time.monotonic() + grace)
        time.sleep(0.02)
    return ended


def _report_of(rank: int, store: Store) -> dict[str, Any] | None:
    key = f"report/{rank}"
    return json.loads(store.get(key)) if store.check([key]) else None
