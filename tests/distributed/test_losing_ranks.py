"""One process of two is lost, or asked to stop: the other does not wait, and says which it was."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from runs import Started, identical, last, run

from postil.training.curves import read_metrics

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by /proc")

FOREVER = {"devices": 2, "updates": 100_000, "evaluate_every": 50, "save_every": 2}


@pytest.mark.case("BC068")
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_others_and_is_named(settings, rank: int, figure) -> None:
    s = settings(**FOREVER)
    with Started(s) as started:
        ranks = started.until_saved(20)
        assert sorted(ranks) == [0, 1]
        began = time.monotonic()
        os.kill(ranks[rank], signal.SIGKILL)
        assert started.ends_within(15) not in (0, -signal.SIGKILL)
        figure(seconds=round(time.monotonic() - began, 1))
        assert f"rank {rank} was killed by SIGKILL" in started.said
    reached = last(s.out).step
    s.updates = reached + 3
    assert run(s, resume="auto").update == reached + 3


@pytest.mark.case("BC068")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_the_others_and_is_named(settings, rank: int, strategy: str, figure) -> None:
    with Started(settings(**FOREVER, strategy=strategy)) as started:
        pid = started.until_saved(10)[rank]
        began = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        assert started.ends_within(60) != 0
        figure(seconds=round(time.monotonic() - began, 1))
        assert f"rank {rank} does not answer" in started.said


# Where one rank is struck: between the batches of an evaluation, while a sharded model is put together for a
# save, and while one writes it and the other waits, however long that takes.
PLACES = {
    "evaluation": (1, "loop.NextTokenLoss, 'forward', lambda self, *_: not self.training"),
    "save": (1, "sitting, 'whole', lambda *_: True"),
    "writing": (0, "checkpoints, 'save', lambda *_: True"),
}
FAULTS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "rank {rank} was killed by SIGKILL", 15),
    "raises": ("raise OSError('the disk is gone')", "rank {rank} failed: OSError: the disk is gone", 15),
    "leaves": ("os._exit(0)", "rank {rank} ended early, with exit code 0", 15),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "rank {rank} does not answer", 60),
    "stuck": ("time.sleep(10**6)", "rank {rank} lives but did not come", 90),
}
STRUCK = """
import os, pathlib, signal, time
if os.environ.get("LOCAL_RANK") == "{rank}":
    from postil.training import checkpoints, loop, sitting

    def struck(place, name, when):
        function, calls = getattr(place, name), []

        def called(*arguments, **options):
            calls.append(when(*arguments))
            if sum(calls) == 3 and calls[-1]:
                pathlib.Path({mark!r}).touch()
                {fault}
            return function(*arguments, **options)

        setattr(place, name, called)

    struck({place})
"""


def struck_in(place: str, fault: str) -> Any:
    slow = [] if (place, fault) == ("save", "killed") else [pytest.mark.slow]
    return pytest.param(place, fault, marks=slow, id=f"{fault} in {place}")


# Whoever writes may take as long as a slow disk does: nobody could tell that from being stuck.
@pytest.mark.case("BC068", "BC101")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("place", "fault"),
    [
        struck_in(place, fault)
        for place in PLACES
        for fault in FAULTS
        if (place, fault) != ("writing", "stuck")
    ],
)
def test_a_rank_lost_between_updates_is_named(
    settings, tmp_path: Path, place: str, fault: str, figure
) -> None:
    rank, where = PLACES[place]
    does, message, seconds = FAULTS[fault]
    mark = tmp_path / "struck"
    (tmp_path / "sitecustomize.py").write_text(
        STRUCK.format(rank=rank, place=where, fault=does, mark=str(mark))
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    strategy = "fsdp" if place == "save" else "ddp"
    s = settings(**{**FOREVER, "evaluate_every": 3, "sample_every": 0}, strategy=strategy)
    with Started(s, environment={"PYTHONPATH": path}) as started:
        deadline = time.monotonic() + 240
        while not mark.exists():
            assert started.process.poll() is None and time.monotonic() < deadline, started.said
            time.sleep(0.02)
        began = time.monotonic()
        assert started.ends_within(seconds) not in (0, -signal.SIGKILL)
        figure(seconds=round(time.monotonic() - began, 1))
        assert message.format(rank=rank) in started.said
    reached = last(s.out).step
    s.updates = reached + 1
    assert run(s, resume="auto").update == reached + 1


# Python imports a module of this name before anything else, in every process.
FAULTY = """
import os
if os.environ.get("LOCAL_RANK") == "1":
    from postil.training import loop
    original, calls = loop.NextTokenLoss.forward, []

    def faulty(self, ids, targets):
        calls.append(self.training)
        nats, correct = original(self, ids, targets)
        if sum(calls) == 12 and self.training:
            {fault}
        return nats, correct

    loop.NextTokenLoss.forward = faulty
"""


@pytest.mark.case("BC101")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise OSError('the disk is gone')", "rank 1 failed: OSError: the disk is gone"),
        ("raise RuntimeError('no such kernel')", "rank 1 failed: RuntimeError: no such kernel"),
        ("raise SystemExit(0)", "rank 1"),
        ("os._exit(0)", "rank 1 ended early, with exit code 0"),
        ("nats = nats * float('nan')", "update 12: loss nan"),
    ],
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_fault_in_one_rank_ends_all(
    settings, tmp_path: Path, fault: str, message: str, strategy: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULTY.format(fault=fault))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    s = settings(devices=2, strategy=strategy, updates=40, evaluate_every=50, save_every=5, sample_every=0)
    with Started(s, environment={"PYTHONPATH": path}) as started:
        assert started.ends_within(120) != 0
        assert message in started.said
    kept = last(s.out)
    assert kept.step == 10
    assert all(t.isfinite().all() for group in kept.tensors.values() for t in group.values())
    straight = run(settings(**{**vars(s), "out": str(tmp_path / "straight"), "model": {}, "optimizer": {}}))
    assert identical(last(straight.path), last(run(s, resume="auto").path))


@pytest.mark.case("BC107")
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_both_ranks_leave_together_when_asked_and_lose_nothing(
    settings, tmp_path: Path, strategy: str
) -> None:
    same = {"devices": 2, "strategy": strategy, "evaluate_every": 1000, "model": {"dropout": 0.1}}
    s = settings(updates=100_000, save_every=1000, **same)
    with Started(s) as started:
        metrics = started.out / "metrics.jsonl"
        while not metrics.exists() or len(read_metrics(metrics)) < 15:
            assert started.process.poll() is None, started.said
        started.process.send_signal(signal.SIGTERM)
        assert started.ends_within(30) == 143
        assert "asked to stop by SIGTERM" in started.said
    stopped = last(s.out).step
    lines = [line["update"] for line in read_metrics(metrics) if line["kind"] == "train"]
    assert lines == list(range(1, stopped + 1))
    s.updates = stopped + 5
    straight = run(settings(updates=s.updates, out=str(tmp_path / "straight"), save_every=1000, **same))
    assert identical(last(straight.path), last(run(s, resume="auto").path))


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_both(settings) -> None:
    s = settings(**FOREVER)
    with Started(s) as started:
        os.kill(started.until_saved(10)[1], signal.SIGTERM)
        assert started.ends_within(30) == 143
        assert "asked to stop by SIGTERM" in started.said


@pytest.mark.slow
def test_no_rank_outlives_whoever_started_it(settings) -> None:
    with Started(settings(**FOREVER)) as started:
        started.until_saved(10)
        started.process.kill()
        started.process.wait()
        assert started.process.returncode == -signal.SIGKILL
        for _ in range(150):
            if not started.ranks():
                return
            subprocess.run(["sleep", "0.1"], check=True)
        raise AssertionError("a process was left behind")


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="lists sockets by /proc")
def test_nothing_listens_beyond_this_machine(settings) -> None:
    with Started(settings(**FOREVER)) as started:
        pids = [started.process.pid, *started.until_saved(2).values()]
        assert len(pids) == 3
        sockets = set()
        for pid in pids:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                try:
                    target = str(entry.readlink())
                except OSError:
                    continue
                if target.startswith("socket:["):
                    sockets.add(target[8:-1])
        listening = []
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in sockets:
                    listening.append(fields[1].partition(":")[0])
        assert listening, "the processes meet somewhere"
        assert set(listening) == {"0100007F"}


def test_errors_of_the_user_are_the_same_as_in_one_process(settings, tmp_path: Path) -> None:
    from postil.training.run_directory import RunDirectoryError

    with pytest.raises(ValueError, match=r"text='-' can be read by one process, not by 2"):
        run(settings(devices=2, text="-"))
    with pytest.raises(ValueError, match=r"nodes=2: on each machine start `torchrun --nnodes 2"):
        run(settings(nodes=2))
    out = tmp_path / "run"
    out.mkdir()
    (out / "run.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match="holds a run already"):
        run(settings(devices=2))
