r"""F2, F7, F8: kill -9 at any moment, two runs in one directory, and signals."""

import os
import random
import signal
import time
import warnings

import pytest

from postil.training import checkpoints
from postil.training.run_directory import RunDirectory, RunDirectoryError
from postil.training.signals import stopping_gracefully

SIZE = 300_000


def killed(saver, whole, child, directory, trials, seed):
    r"""Kill a loop of saves `trials` times; return how often nothing whole was left."""
    moments = random.Random(seed)
    lost = 0
    saver.save(directory, 1, SIZE)
    for _ in range(trials):
        try:
            step = whole(saver, directory, SIZE)
        except Exception:
            lost += 1
            saver.save(directory, 1, SIZE)
            step = 1
        ready, say_ready = os.pipe()

        def loop(step=step, say_ready=say_ready):
            os.write(say_ready, b"x")
            while True:
                step += 1
                saver.save(directory, step, SIZE)

        trial = child(loop)
        os.read(ready, 1)
        time.sleep(moments.uniform(0, 0.05))
        assert trial.kill().wait() == -signal.SIGKILL
        os.close(ready)
        os.close(say_ready)
    return lost


@pytest.mark.case("BC053")
def test_fifty_kills_lose_nothing(good, whole, child, tmp_path, names, figure):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lost = killed(good, whole, child, tmp_path, 50, seed=1)
        figure(kills=50, lost=lost)
        assert lost == 0
        step = whole(good, tmp_path, SIZE)
        good.save(tmp_path, step + 1, SIZE)
    assert names(tmp_path) == [f"step-{step + 1:08d}"]


def test_kills_find_the_bad_saver_out(bad, whole, child, tmp_path, figure):
    lost = killed(bad, whole, child, tmp_path, 15, seed=3)
    figure(kills=15, lost=lost)
    assert lost >= 1


def opens(path, ready, **options):
    r"""A process that opens the run, writes in it for a while, and says by its code how that went."""

    def run():
        os.read(ready, 1)
        try:
            with RunDirectory.open(path, **options) as run:
                for step in range(5):
                    run.log({"step": step, "pid": os.getpid()})
                    time.sleep(0.1)
        except RunDirectoryError as error:
            holds = "is using it" in str(error) or "holds a run already" in str(error)
            return 2 if holds and "\n" not in str(error) else 98
        return 0

    return run


@pytest.mark.case("BC106")
@pytest.mark.parametrize("before", ["nothing", "a killed run", "a used again process id"])
def test_of_runs_that_start_together_exactly_one_wins(child, tmp_path, before):
    for attempt in range(4 if before == "nothing" else 3):
        path = tmp_path / str(attempt)
        options = {}
        if before == "a killed run":
            holder = child(lambda path=path: RunDirectory.open(path) and time.sleep(60))
            while not (path / "run.lock").exists() or not (path / "run.lock").read_text():
                time.sleep(0.01)
            holder.kill().wait()
        elif before == "a used again process id":
            path.mkdir()
            (path / "run.lock").write_text(f'{{"pid": {os.getpid()}, "start": "1", "host": "x"}}')
        start, say_start = os.pipe()
        runs = [child(opens(path, start, **options)) for _ in range(4)]
        os.write(say_start, b"xxxx")
        assert sorted(run.wait() for run in runs) == [0, 2, 2, 2]
        lines = (path / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == 5 and len({line.split("pid")[1] for line in lines}) == 1


@pytest.mark.case("BC106")
def test_two_savers_in_one_directory_lose_nothing(good, whole, child, tmp_path):
    # Not what the lock allows, but unlike a shared temporary name it must not break anything either.
    def loop(first):
        def save():
            for step in range(first, first + 20, 2):
                good.save(tmp_path, step, keep=30)

        return save

    assert [each.wait() for each in [child(loop(1)), child(loop(2))]] == [0, 0]
    assert len(checkpoints.steps(tmp_path)) == 20
    for path in checkpoints.steps(tmp_path):
        checkpoints.load(path)
    assert whole(good, tmp_path) == 20


@pytest.mark.case("BC107")
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_saves_at_the_current_step(good, whole, child, tmp_path, number, code):
    ready, say_ready = os.pipe()

    def training():
        with stopping_gracefully() as stop:
            step = 0
            while not stop:
                step += 1
                if step == 3:
                    os.write(say_ready, b"x")
                time.sleep(0.01)
            good.save(tmp_path, step)
            (tmp_path / "reached").write_text(str(step))
            return stop.exit_code

    trial = child(training)
    os.read(ready, 1)
    assert trial.kill(number).wait(10) == code
    assert whole(good, tmp_path) == int((tmp_path / "reached").read_text())


@pytest.mark.case("BC108")
def test_the_second_signal_during_a_save_harms_nothing(good, whole, child, tmp_path):
    moments = random.Random(4)
    good.save(tmp_path, 1, SIZE)
    for _ in range(8):
        ready, say_ready = os.pipe()
        step = whole(good, tmp_path, SIZE)

        def saving(step=step, say_ready=say_ready):
            with stopping_gracefully() as stop:
                os.write(say_ready, b"x")
                while not stop:
                    time.sleep(0.001)
                while True:
                    step += 1
                    good.save(tmp_path, step, SIZE)

        trial = child(saving)
        os.read(ready, 1)
        trial.kill(signal.SIGTERM)
        time.sleep(0.02 + moments.uniform(0, 0.03))
        assert trial.kill(signal.SIGTERM).wait(10) == 143
        assert whole(good, tmp_path, SIZE) >= step
