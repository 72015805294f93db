import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from postil import durable
from postil.training import checkpoints
from postil.training.lock import Lock, Locked
from postil.training.run_directory import RunDirectory, RunDirectoryError


def lines(run):
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def test_a_fresh_directory_is_made(tmp_path):
    with RunDirectory.open(tmp_path / "runs" / "first") as run:
        run.write_json({"text": "ü", "d_model": 4})
        assert run.log({"step": 1, "loss": 2.5})
        checkpoints.save(run.checkpoints, 1, {"model": {}}, {})
        assert run.read_json() == {"text": "ü", "d_model": 4}
        assert run.read_json("other.json") is None
    found = sorted(path.name for path in run.path.iterdir())
    assert found == ["checkpoints", "metrics.jsonl", "run.json", "run.lock"]


@pytest.mark.case("BC105")
@pytest.mark.parametrize("trace", ["run.json", "metrics.jsonl", "checkpoint"])
def test_a_second_run_is_refused_unless_asked_for(tmp_path, trace):
    with RunDirectory.open(tmp_path) as run:
        if trace == "checkpoint":
            checkpoints.save(run.checkpoints, 1, {"model": {}}, {})
        else:
            (tmp_path / trace).write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(
        RunDirectoryError,
        match=r"holds a run already .*; go on with --resume auto, remove it with --overwrite, or",
    ):
        RunDirectory.open(tmp_path)
    RunDirectory.open(tmp_path, resume=True).close()
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    with pytest.raises(RunDirectoryError, match="contradict"):
        RunDirectory.open(tmp_path, resume=True, overwrite=True)
    RunDirectory.open(tmp_path, overwrite=True).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "notes.txt", "run.lock"]
    assert list((tmp_path / "checkpoints").iterdir()) == []
    RunDirectory.open(tmp_path).close()


@pytest.mark.case("BC105")
@pytest.mark.case("BC106")
def test_a_live_run_is_guarded_by_name_and_a_dead_one_is_not(tmp_path):
    code = (
        "import sys, time; from postil.training.run_directory import RunDirectory\n"
        "run = RunDirectory.open(sys.argv[1])\n"
        "print('open', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "open\n"
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(
                RunDirectoryError, match=rf"process {owner.pid} is using it; wait for it, stop it"
            ):
                RunDirectory.open(tmp_path, **options)
        owner.kill()
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == owner.pid
    RunDirectory.open(tmp_path).close()


@pytest.mark.case("BC105")
def test_a_stale_lock_of_a_used_again_process_id_does_not_block(tmp_path):
    me = {"pid": os.getppid(), "start": "1", "host": durable.HOST}
    (tmp_path / "run.lock").write_text(json.dumps(me))
    RunDirectory.open(tmp_path).close()
    assert durable.is_running(os.getppid(), durable.process_start(os.getppid()))
    assert not durable.is_running(os.getppid(), "1") or not sys.platform.startswith("linux")
    assert not durable.is_running(0) and not durable.is_running(-1) and not durable.is_running(2**40)


@pytest.mark.parametrize("text", ["", "garbage", "[]", '{"pid": "x"}', "\x00" * 5000])
def test_a_damaged_lock_file_does_not_block(tmp_path, text):
    (tmp_path / "run.lock").write_text(text)
    RunDirectory.open(tmp_path).close()


def test_a_lock_is_held_once_in_a_process_too_and_not_by_its_children(tmp_path):
    lock = Lock(tmp_path / "lock")
    with pytest.raises(Locked, match=f"process {os.getpid()} is using it"):
        Lock(tmp_path / "lock")
    ready, say_ready = os.pipe()
    end, say_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(say_end)
        os.write(say_ready, b"x")
        os.read(end, 1)
        os._exit(0)
    # The child lives on, as a worker process may; it must not hold what its parent has let go of.
    try:
        os.read(ready, 1)
        os.close(lock._file)
        lock._file = None
        Lock(tmp_path / "lock").release()
    finally:
        os.close(say_end)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("alive", [True, False])
def test_without_locks_of_the_kernel_the_process_id_guards(tmp_path, monkeypatch, alive):
    import fcntl

    def unsupported(file, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    pid = os.getppid()
    owner = {"pid": pid, "start": durable.process_start(pid) if alive else "1", "host": durable.HOST}
    (tmp_path / "run.lock").write_text(json.dumps(owner))
    if alive or not sys.platform.startswith("linux"):
        with pytest.raises(RunDirectoryError, match=f"process {pid} on .* is using it"):
            RunDirectory.open(tmp_path)
    else:
        RunDirectory.open(tmp_path).close()


def test_leftovers_of_any_machine_go_under_the_lock(tmp_path):
    for folder in (tmp_path, tmp_path / "checkpoints"):
        folder.mkdir(exist_ok=True)
        (folder / ".postil-x~another-machine~1~1~00000000").write_text("half")
    RunDirectory.open(tmp_path).close()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["checkpoints", "run.lock"]


def test_a_path_that_cannot_be_a_directory(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunDirectoryError, match="cannot be written: "):
            RunDirectory.open(path)
    (tmp_path / "run.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirectoryError, match=r"run: cannot be written|cannot be written"):
        RunDirectory.open(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.case("BC134")
@pytest.mark.parametrize(
    "name",
    ["../x", "a/../../x", "/etc/hostname", "..", ".", "", ".x", "a\nb", "a" * 101, "C:\\x", "ü", "a b"],
)
def test_names_are_one_plain_component(tmp_path, name):
    with pytest.raises(ValueError, match="expected 1 to 100 of the characters"):
        durable.inside(tmp_path, name, "run")
    with RunDirectory.open(tmp_path / "run") as run, pytest.raises(ValueError, match="name"):
        run.write_json({}, name)
    assert not (tmp_path / "x").exists() and not (tmp_path.parent / "x").exists()


@pytest.mark.case("BC134")
def test_a_link_does_not_lead_outside(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="run 'link': leads outside"):
        durable.inside(tmp_path / "runs", "link", "run")
    (tmp_path / "runs" / "again").symlink_to("fine")
    assert durable.inside(tmp_path / "runs", "again").name == "again"
    assert durable.inside(tmp_path / "runs", "a-b_c.1").name == "a-b_c.1"


def test_a_link_in_place_of_a_file_is_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    with RunDirectory.open(tmp_path / "run") as run:
        for name in ("run.json", "metrics.jsonl"):
            (run.path / name).symlink_to(victim)
        with pytest.raises(ValueError, match="leads outside"):
            run.write_json({"a": 1})
        with pytest.warns(RuntimeWarning, match=r"metrics.jsonl: cannot be written"):
            assert not run.log({"step": 1})
    assert victim.read_text() == "mine"


def test_lines_hold_what_training_has(tmp_path):
    with RunDirectory.open(tmp_path) as run:
        run.log({"step": 1, "loss": float("nan"), "norm": float("inf"), "low": -float("inf")})
        run.log(
            {
                "step": 2,
                "loss": torch.tensor(1.5),
                "rate": np.float32(0.5),
                "n": np.int64(3),
                "s": "a\nb\u2028",
            }
        )
        assert lines(run)[0] == {"step": 1, "loss": "nan", "norm": "inf", "low": "-inf"}
        assert lines(run)[1] == {"step": 2, "loss": 1.5, "rate": 0.5, "n": 3, "s": "a\nb\u2028"}
    assert len((tmp_path / "metrics.jsonl").read_bytes().split(b"\n")) == 3


def test_a_resumed_log_has_each_step_once(tmp_path):
    with RunDirectory.open(tmp_path) as run:
        run.log({"about": "no step"})
        for step in range(1, 8):
            run.log({"step": step, "loss": step / 2})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    with RunDirectory.open(tmp_path, resume=True) as run:
        run.log({"step": 99})
        assert run.cut_metrics(5) == 4 - 1
        run.log({"step": 6, "loss": 0.0})
        assert [line.get("step") for line in lines(run)] == [None, 1, 2, 3, 4, 5, 6]
        assert run.cut_metrics(6) == 0
    assert [path.name for path in tmp_path.glob(".postil-*")] == []


def test_nothing_to_cut(tmp_path):
    with RunDirectory.open(tmp_path) as run:
        assert run.cut_metrics(5) == 0
        (tmp_path / "metrics.jsonl").write_bytes(b'{"update": 3}\n\xff\xfe\n[1]\n{"update": 4}\n')
        assert run.cut_metrics(3, key="update") == 3
        assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"update": 3}\n'


@pytest.mark.parametrize("failure", ["error", "short"])
def test_a_line_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch, failure):
    write = os.write

    def failing(file, data):
        if failure == "error":
            raise OSError(28, "No space left on device")
        return write(file, bytes(data)[:5])

    with RunDirectory.open(tmp_path) as run:
        run.log({"step": 1})
        with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="No space left") as caught:
            patch.setattr(os, "write", failing)
            assert not run.log({"step": 2})
            assert not run.log({"step": 3})
        assert len(caught) == 1 and run.lost_lines == 2
        assert run.log({"step": 4})
        assert [line["step"] for line in lines(run)] == [1, 4]


def test_a_damaged_json_file_is_named(tmp_path):
    with RunDirectory.open(tmp_path) as run:
        (tmp_path / "run.json").write_text('{"a": ')
        with pytest.raises(RunDirectoryError, match=r"run.json: not JSON"):
            run.read_json()


def test_replacing_a_file_fails_whole(tmp_path, monkeypatch):
    with RunDirectory.open(tmp_path) as run:
        run.write_json({"a": 1})

        def failing(file):
            raise OSError(5, "Input/output error")

        with (
            monkeypatch.context() as patch,
            pytest.raises(RunDirectoryError, match=r"run.json: .*Input/output"),
        ):
            patch.setattr(os, "fsync", failing)
            run.write_json({"a": 2})
        assert run.read_json() == {"a": 1}
        assert not list(tmp_path.glob(".postil-*"))


def test_opening_costs_no_waiting(tmp_path):
    # A lock file whose owner has not written its name yet is waited for, but not for long.
    Path(tmp_path / "run.lock").write_text("")
    lock = Lock(tmp_path / "run.lock")
    os.truncate(tmp_path / "run.lock", 0)
    before = time.monotonic()
    with pytest.raises(RunDirectoryError, match="another process is using it"):
        RunDirectory.open(tmp_path)
    assert time.monotonic() - before < 5
    lock.release()
    lock.release()
