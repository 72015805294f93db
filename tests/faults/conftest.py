r"""What the fault tests share: a saver that is known to be bad, forked trials, and disks that can be full.

Every test here runs on our checkpoints and on the bad saver, and must find the bad one out.
"""

import os
import shutil
import signal
import subprocess
import time
import traceback
from pathlib import Path

import pytest
import safetensors.torch
import torch

from postil.training import checkpoints


def tensors(step, size=1000):
    generator = torch.Generator().manual_seed(step)
    return {"weight": torch.randn(size, generator=generator), "step": torch.tensor(step)}


class Good:
    r"""Our checkpoints, as a run uses them."""

    def save(self, directory, step, size=1000, keep=1):
        checkpoints.save(directory, step, {"model": tensors(step, size)}, {"step": step}, keep=keep)

    def latest(self, directory):
        found = checkpoints.latest(directory)
        assert found is not None, "no checkpoint"
        assert found.metadata == {"step": found.step}
        return found.tensors["model"]


class Bad:
    r"""What many scripts do: one file, written in place, read without a check."""

    def save(self, directory, step, size=1000, keep=1):
        data = safetensors.torch.save(tensors(step, size))
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / "model.safetensors", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            for start in range(0, len(data), 2**16):
                piece = data[start : start + 2**16]
                if os.write(file, piece) != len(piece):
                    raise OSError(28, "No space left on device")
        finally:
            os.close(file)

    def latest(self, directory):
        return safetensors.torch.load_file(directory / "model.safetensors")


@pytest.fixture
def good():
    return Good()


@pytest.fixture
def bad():
    return Bad()


@pytest.fixture(scope="session", autouse=True)
def warm(tmp_path_factory):
    # The first save imports modules lazily, and those calls would be counted as calls of the save.
    Good().save(tmp_path_factory.mktemp("warm"), 1)


@pytest.fixture
def whole():
    r"""Which step the directory's latest checkpoint holds; an error if any number of it is another."""

    def check(saver, directory, size=1000):
        found = saver.latest(directory)
        expected = tensors(int(found["step"]), size)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), "wrong numbers"
        return int(found["step"])

    return check


class Child:
    r"""A forked trial: starts at once, since the parent has imported everything."""

    def __init__(self, function):
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                code = function() or 0
            except SystemExit as left:
                code = left.code
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)
        return self

    # Where there is ten times as much to do as there are processors, all takes ten times as long, and a limit
    # would say nothing about what is tested.
    def wait(self, seconds=30):
        seconds *= max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        self.kill()
        os.waitpid(self.pid, 0)
        raise AssertionError(f"a trial did not end within {seconds:.0f} s")


@pytest.fixture(scope="session")
def child():
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    return Child


@pytest.fixture
def disk(tmp_path):
    r"""A small disk of its own, by `disk(megabytes)`; `disk(options)` mounts the same one again."""
    place = tmp_path / "disk"
    mounted = []

    def mount(options):
        if not shutil.which("mount") or os.name == "nt" or os.geteuid() != 0:
            pytest.skip("mounting a small disk needs root")
        place.mkdir(exist_ok=True)
        options = f"remount,{options}" if mounted else options
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", place], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"mounting a small disk is not allowed here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    if mounted:
        subprocess.run(["umount", place], check=True)


@pytest.fixture
def names():
    return lambda directory: sorted(path.name for path in Path(directory).iterdir())
