"""Two nodes, which here are two launchers on one machine, meet on its loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import largest_difference, last, run

from postil.training.settings import TrainSettings

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start_nodes(settings: TrainSettings) -> list[subprocess.Popen[str]]:
    record = Path(str(settings.out)).with_suffix(".json")
    record.write_text(json.dumps(settings.to_dict()))
    port, nodes = free_port(), []
    for rank in (0, 1):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        command += [f"--node-rank={rank}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        command += ["-m", "postil.cli", "train", f"--config={record}"]
        log = Path(str(settings.out)).with_suffix(f".{rank}.log").open("w")
        nodes.append(subprocess.Popen(command, stdout=log, stderr=log, text=True))
    return nodes


def said(settings: TrainSettings, rank: int) -> str:
    return Path(str(settings.out)).with_suffix(f".{rank}.log").read_text()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_nodes_are_one_process(settings, tmp_path: Path, strategy: str, figure) -> None:
    s = settings(strategy=strategy)
    codes = [node.wait(timeout=200) for node in start_nodes(s)]
    assert codes == [0, 0], said(s, 0) + said(s, 1)
    straight = run(settings(out=str(tmp_path / "straight")))
    record = json.loads((Path(str(s.out)) / "run.json").read_text())
    assert (record["settings"]["nodes"], record["conditions"]["world_size"]) == (2, 2)
    one, other = last(straight.path), last(s.out)
    difference = largest_difference(s.mixer, one.tensors["model"], other.tensors["model"])
    figure(difference=difference)
    assert difference <= 1e-6


@pytest.mark.case("BC068")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes by /proc")
@pytest.mark.parametrize(
    ("number", "seconds"), [(signal.SIGKILL, 15), (signal.SIGSTOP, 60)], ids=["killed", "stopped"]
)
def test_a_lost_node_ends_the_other_and_is_named(
    settings, number: signal.Signals, seconds: int, figure
) -> None:
    s = settings(updates=100_000, evaluate_every=50, save_every=2)
    nodes = start_nodes(s)
    worker = None
    try:
        deadline = time.monotonic() + 150
        while not (Path(str(s.out)) / "checkpoints" / "step-00000010").exists():
            assert time.monotonic() < deadline and nodes[0].poll() is None, said(s, 0)
            time.sleep(0.05)
        pid = nodes[1].pid
        worker = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        # The launcher too: one that lives would tell the other node's.
        os.kill(pid, signal.SIGKILL if number == signal.SIGKILL else signal.SIGSTOP)
        os.kill(worker, number)
        # The launcher takes its time to say goodbye; what it launched must be gone.
        children = Path(f"/proc/{nodes[0].pid}/task/{nodes[0].pid}/children")
        began = time.monotonic()
        while nodes[0].poll() is None and children.read_text().split():
            assert time.monotonic() < began + seconds, said(s, 0)
            time.sleep(0.05)
        figure(seconds=round(time.monotonic() - began, 1))
        assert nodes[0].wait(timeout=60) != 0
        assert "rank 1 does not answer; rank 0 cannot go on without it" in said(s, 0)
    finally:
        for pid in [worker, *(node.pid for node in nodes)]:
            if pid is not None:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for node in nodes:
            node.wait()
