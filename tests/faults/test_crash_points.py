r"""F2, F3, F14: the process dies, or a call fails, at every single step of a save."""

import errno
import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import safetensors.torch

from postil.training import checkpoints
from postil.training.run_directory import RunDirectory

CALLS = ["open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir", "chmod", "ftruncate"]
DIED = 77


class Steps:
    r"""Counts the calls that change the disk and lets one of them go wrong."""

    def __init__(self, fatal, action):
        self.count, self.fatal, self.action = 0, fatal, action

    def wrap(self, real, name):
        def call(*arguments, **options):
            self.count += 1
            if self.count == self.fatal:
                return self.action(real, name, arguments, options)
            return real(*arguments, **options)

        return call

    def install(self, patch):
        for name in CALLS:
            patch.setattr(os, name, self.wrap(getattr(os, name), name))
        file = safetensors.torch.save_file
        patch.setattr(safetensors.torch, "save_file", self.wrap(file, "save_file"))


# Dying in the middle of a write leaves half of it.
def die(real, name, arguments, options):
    if name == "write":
        real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
    if name == "save_file":
        real(*arguments, **options)
        os.truncate(arguments[1], arguments[1].stat().st_size // 2)
    os._exit(DIED)


def crash_everywhere(saver, whole, child, start, again, size=1000):
    r"""Die at call 1, 2, 3, ... of saving step `again` over `start`; return what was then wrong."""
    wrong = []
    for fatal in range(1, 200):
        directory = start.with_name(f"{start.name}-{fatal}")
        shutil.copytree(start, directory)

        def trial(directory=directory, fatal=fatal):
            with pytest.MonkeyPatch.context() as patch:
                Steps(fatal, die).install(patch)
                saver.save(directory, again, size)

        code = child(trial).wait()
        assert code in (0, DIED), f"the trial itself failed at call {fatal}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert whole(saver, directory, size) in (10, again)
                left = len(list(directory.iterdir()))
                assert left <= 3, f"{left} checkpoints and leftovers at once"
                # The next start goes on, and nothing of the crash stays behind.
                saver.save(directory, 30, size)
                assert whole(saver, directory, size) == 30
                assert len(list(directory.iterdir())) == 1, sorted(directory.iterdir())
        except Exception as error:
            wrong.append((fatal, repr(error)))
        shutil.rmtree(directory)
        if code == 0:
            return wrong, fatal - 1
    raise AssertionError("more than 200 calls in one save")


@pytest.mark.case("BC053")
@pytest.mark.parametrize("again", [20, 10], ids=["next step", "same step again"])
def test_dying_at_every_call_leaves_the_old_or_the_new(good, whole, child, tmp_path, again, figure):
    good.save(tmp_path / "run", 10)
    wrong, points = crash_everywhere(good, whole, child, tmp_path / "run", again)
    figure(points=points, lost=len(wrong))
    assert wrong == []
    assert points >= 18, f"only {points} crash points were seen"


def test_dying_in_the_bad_saver_is_found_out(bad, whole, child, tmp_path, figure):
    bad.save(tmp_path / "run", 10)
    wrong, points = crash_everywhere(bad, whole, child, tmp_path / "run", 20)
    figure(points=points, lost=len(wrong))
    assert points >= 2 and len(wrong) >= 1


def test_dying_while_files_of_the_run_are_replaced_leaves_the_old_or_the_new(child, tmp_path):
    old = {"metrics": [1, 2, 3, 4], "run": {"a": 1}}
    seen = []
    for fatal in range(1, 60):
        path = tmp_path / str(fatal)
        with RunDirectory.open(path) as run:
            run.write_json(old["run"])
            for step in old["metrics"]:
                run.log({"step": step})

        def trial(path=path, fatal=fatal):
            with RunDirectory.open(path, resume=True) as run, pytest.MonkeyPatch.context() as patch:
                Steps(fatal, die).install(patch)
                run.cut_metrics(2)
                run.write_json({"a": 2})

        code = child(trial).wait()
        assert code in (0, DIED)
        with RunDirectory.open(path, resume=True) as run:
            lines = (path / "metrics.jsonl").read_text().splitlines()
            steps = [json.loads(line)["step"] for line in lines]
            assert steps in ([1, 2, 3, 4], [1, 2]) and run.read_json() in ({"a": 1}, {"a": 2})
            seen.append((len(steps), run.read_json()["a"]))
        assert not list(path.glob(".postil-*"))
        if code == 0:
            break
    assert len(seen) >= 10 and set(seen) == {(4, 1), (2, 1), (2, 2)}


def fail_everywhere(saver, whole, start, code, again=20):
    r"""Let call 1, 2, 3, ... of a save fail with `code`; return what was then wrong, and the messages."""

    def fail(real, name, arguments, options):
        if name == "write":
            real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
        if name == "save_file":
            text = f"Error while serializing: I/O error: {os.strerror(code)} (os error {code})"
            raise safetensors.SafetensorError(text)
        raise OSError(code, os.strerror(code), arguments[0])

    wrong, messages = [], []
    for fatal in range(1, 200):
        directory = start.with_name(f"{start.name}-{fatal}")
        shutil.copytree(start, directory)
        steps = Steps(fatal, fail)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            steps.install(patch)
            try:
                saver.save(directory, again)
            except (checkpoints.CheckpointError, OSError) as error:
                messages.append(str(error))
            else:
                messages += [str(each.message) for each in said]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert whole(saver, directory) in (10, again)
                saver.save(directory, 30)
                assert whole(saver, directory) == 30
        except Exception as error:
            wrong.append((fatal, repr(error)))
        shutil.rmtree(directory)
        if steps.count < fatal:
            return wrong, messages
    raise AssertionError("more than 200 calls in one save")


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EROFS, errno.EDQUOT])
def test_every_call_that_fails_is_reported_and_harms_nothing(good, whole, tmp_path, code, figure):
    good.save(tmp_path / "run", 10)
    wrong, messages = fail_everywhere(good, whole, tmp_path / "run", code)
    figure(calls=len(messages), lost=len(wrong))
    assert wrong == []
    assert len(messages) >= 15
    for message in messages:
        assert os.strerror(code) in message and str(tmp_path) in message and "\n" not in message, message


def test_failing_calls_in_the_bad_saver_are_found_out(bad, whole, tmp_path):
    bad.save(tmp_path / "run", 10)
    wrong, _ = fail_everywhere(bad, whole, tmp_path / "run", errno.EIO)
    assert wrong


def test_without_file_descriptors_a_save_fails_and_harms_nothing(good, whole, child, tmp_path, capfd):
    resource = pytest.importorskip("resource")
    good.save(tmp_path, 10)

    def trial(spare):
        limit = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 1 + spare
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        # Whatever is free below the highest number is taken, so that exactly `spare` are left.
        taken = []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            for file in taken[len(taken) - spare :] if spare else []:
                os.close(file)
        try:
            good.save(tmp_path, 20)
        except checkpoints.CheckpointError as error:
            assert "Too many open files" in str(error) and str(tmp_path) in str(error), error
            return 3
        return 0

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    codes = [child(lambda spare=spare: trial(spare)).wait() for spare in (0, 1, 2, 3, 8)]
    assert codes[0] == 3 and codes[-1] == 0 and set(codes) == {0, 3}, capfd.readouterr().err
    assert whole(good, tmp_path) == 20
