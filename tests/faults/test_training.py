r"""F1, F8 to F11, F15, F17: the real training, struck at every kind of moment, and what is left of it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from whole_runs import (
    SAVE_EVERY,
    Gate,
    Run,
    after_a_while,
    at_update,
    checkpoints,
    loop,
    run,
    sitting,
    speak_into,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTIL_CACHE", str(tmp_path / "cache"))


# What everything else is compared with: one run that nobody touched.
@pytest.fixture(scope="module")
def straight(tmp_path_factory, child):
    folder = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POSTIL_CACHE", str(folder / "cache"))
        yield Run(child, folder).whole()


# ## F1: kill -9
def killed(child, tmp_path, kills, updates, before=lambda: None, **changes):
    r"""Kill a run so often, going on each time; return it, and the most updates that were made twice."""
    wait, trial = after_a_while(seed=1), Run(child, tmp_path, updates=updates, **changes)
    repeated = 0
    for _ in range(kills):
        sitting = trial.start(before=before)
        wait(sitting, trial.path / "checkpoints")
        assert sitting.kill().wait(120) in (-signal.SIGKILL, 0), trial.said
        made = trial.losses[-1][0] if trial.losses else 0
        saved = trial.last
        repeated = max(repeated, made - (saved.step if saved else 0))
    return trial.whole(before=before), repeated


@pytest.mark.case("BC053")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills, updates", [(3, 30), pytest.param(20, 200, marks=pytest.mark.slow)])
def test_a_run_killed_again_and_again_ends_as_if_never_touched(child, tmp_path, kills, updates, figure):
    struck, repeated = killed(child, tmp_path, kills, updates)
    assert struck.differs_from(Run(child, tmp_path, "straight", updates=updates).whole()) is None
    assert repeated <= SAVE_EVERY
    assert [update for update, _ in struck.losses] == list(range(1, updates + 1))
    assert len(checkpoints.steps(struck.path / "checkpoints")) <= 3
    assert not list(struck.path.rglob(".postil-*"))
    figure(kills=kills, updates=updates, repeated=repeated)


def test_a_resume_that_forgets_the_optimizer_is_found_out(child, tmp_path, straight):
    def forget():
        run.restore_optimizer = lambda *_: None

    struck, _ = killed(child, tmp_path, 1, 30, before=forget)
    assert struck.differs_from(straight) is not None


# A kill between the first and the last byte of a file that is written in place.
def test_a_run_that_saves_in_place_is_found_out(child, tmp_path):
    gate = Gate()

    def save_in_place(directory, step, tensors, metadata, keep=3, best=False):
        path = Path(directory) / f"step-{step:08d}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "model.safetensors").write_bytes(b"half of it")
        gate.tell()
        time.sleep(30)

    def before():
        checkpoints.save = save_in_place

    trial = Run(child, tmp_path)
    sitting = trial.start(before=before)
    gate.wait()
    sitting.kill().wait()
    with pytest.raises(checkpoints.CheckpointError, match="none of 1 checkpoints can be read"):
        trial.last  # noqa: B018


# ## F8: SIGTERM and SIGINT
def in_preparation(gate):
    original = run.prepare_text

    def prepare(*arguments):
        gate.tell()
        time.sleep(30)
        return original(*arguments)

    run.prepare_text = prepare


def in_a_step(gate):
    at_update(7, lambda _: (gate.tell(), time.sleep(0.2)))


def in_an_evaluation(gate):
    original = sitting.validate

    def validate(session, *rest):
        if session.progress.update == 15:
            gate.tell()
            time.sleep(0.2)
        return original(session, *rest)

    sitting.validate = validate


def in_a_save(gate):
    original = checkpoints.save

    def save(directory, step, *rest, **options):
        if step == 10:
            gate.tell()
            time.sleep(0.2)
        return original(directory, step, *rest, **options)

    checkpoints.save = save


@pytest.mark.case("BC107", "BC108")
@pytest.mark.parametrize(
    "place, reached, number",
    [
        (in_preparation, None, signal.SIGTERM),
        (in_a_step, 7, signal.SIGTERM),
        (in_a_step, 7, signal.SIGINT),
        (in_an_evaluation, 15, signal.SIGTERM),
        (in_a_save, 10, signal.SIGINT),
    ],
)
def test_a_signal_is_served_in_every_phase_and_nothing_is_repeated(
    child, tmp_path, straight, place, reached, number
):
    gate, trial = Gate(), Run(child, tmp_path)
    sitting = trial.start(before=lambda: place(gate))
    gate.wait()
    assert sitting.kill(number).wait(10) == 128 + number, trial.said
    assert "Traceback" not in trial.said
    if reached is None:
        assert not trial.path.exists()
    else:
        assert trial.last.step == reached == trial.losses[-1][0]
    assert trial.whole().differs_from(straight) is None


@pytest.mark.case("BC108")
def test_a_long_evaluation_is_broken_off_and_its_update_is_saved(child, tmp_path):
    gate, trial = Gate(), Run(child, tmp_path, updates=9, evaluate_every=7, evaluate_windows=0)

    def slowly():
        original = loop.evaluate

        def evaluate(loss, batches, device):
            def slow():
                gate.tell()
                for batch in batches:
                    time.sleep(1.5)
                    yield batch

            return original(loss, slow(), device)

        loop.evaluate = evaluate

    sitting = trial.start(before=slowly)
    gate.wait()
    assert sitting.kill(signal.SIGTERM).wait(10) == 143, trial.said
    assert trial.last.step == 7


# A compiler asks nobody. Here it is a long sleep, in the first update and in the first evaluation.
def in_a_compilation(gate, update):
    r"""In a child: model calls sleep from the one on that follows `update` updates, as if they compiled."""
    loop.NextTokenLoss.compile = lambda self: None
    original = loop.NextTokenLoss.forward
    done = []

    def forward(self, ids, targets):
        done.append(self.training)
        if sum(done) > update or (sum(done) == update and not self.training):
            gate.tell()
            time.sleep(30)
        return original(self, ids, targets)

    loop.NextTokenLoss.forward = forward


@pytest.mark.case("BC108")
@pytest.mark.parametrize("updates, kept", [(0, None), (15, 15)], ids=["first update", "first evaluation"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_strikes_where_a_compiler_runs_and_nothing_is_repeated(
    child, tmp_path, updates, kept, number
):
    gate, trial = Gate(), Run(child, tmp_path, save_every=1000, compile=True)
    sitting = trial.start(before=lambda: in_a_compilation(gate, updates))
    gate.wait()
    assert sitting.kill(number).wait(10) == 128 + number, trial.said
    assert "Traceback" not in trial.said
    assert (trial.last.step if trial.last else None) == kept


def processor_time(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# The real compiler, which starts processes of its own; they must be gone too.
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.case("BC108")
def test_a_signal_while_torch_compiles_is_served(tmp_path, child, figure, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    trial = Run(child, tmp_path, compile=True)
    file = trial.path.with_suffix(".json")
    file.write_text(json.dumps(trial.settings))
    process = subprocess.Popen(
        [sys.executable, "-m", "postil.cli", "train", f"--config={file}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 200
    while not (trial.path / "run.json").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    # The first update is made from here on, and it takes many seconds to compile.
    time.sleep(2)
    before = processor_time(process.pid)
    process.send_signal(signal.SIGTERM)
    # Processor time, since the wall clock also counts what others do. Most of it is Python tidying up.
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 143, process.stderr.read()
    seconds = used.ru_utime + used.ru_stime - before
    figure(seconds=round(seconds, 1))
    assert seconds <= 10
    assert trial.last is None
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("a process was left behind")


@pytest.mark.case("BC108")
@pytest.mark.parametrize("place", [in_a_step, in_a_save])
def test_a_second_signal_ends_at_once_and_harms_nothing(child, tmp_path, straight, place):
    gate, trial = Gate(), Run(child, tmp_path)

    def before():
        time.sleep, nap = lambda _: nap(20), time.sleep
        place(gate)

    sitting = trial.start(before=before)
    gate.wait()
    sitting.kill(signal.SIGTERM)
    time.sleep(0.1)
    assert sitting.kill(signal.SIGTERM).wait(5) == 143, trial.said
    assert trial.last.step == 5
    assert trial.whole().differs_from(straight) is None


@pytest.mark.case("BC108")
def test_a_signal_while_everything_is_imported_leaves_no_trace(tmp_path):
    out, code = (
        tmp_path / "run",
        "import sys; print(1, flush=True); from postil.cli import main; sys.exit(main())",
    )
    command = [sys.executable, "-c", code, "train", f"--out={out}", "--updates=1", "--text=/dev/null"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None and process.stdout.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == -signal.SIGTERM
    process.stdout.close()
    assert not out.exists()


def test_a_run_that_ignores_signals_is_found_out(child, tmp_path):
    gate, trial = Gate(), Run(child, tmp_path, updates=100_000)

    def deaf():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        in_a_step(gate)

    sitting = trial.start(before=deaf)
    gate.wait()
    with pytest.raises(AssertionError, match="did not end"):
        sitting.kill(signal.SIGTERM).wait(2)


# ## F9: out of memory
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_too_large_a_batch_gets_advice_and_costs_nothing(child, tmp_path):
    resource = pytest.importorskip("resource")
    large = {"batch_size": 8192, "micro_batch_size": 512}
    trial = Run(child, tmp_path, updates=1, save_every=1, model={"dropout": 0.0}, optimizer=large).whole()
    trial.settings["updates"] = 2
    trial.settings["optimizer"]["micro_batch_size"] = None

    def limit(_):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, resource.RLIM_INFINITY))

    code = trial.start(before=lambda: at_update(2, limit)).wait(60)
    assert code == 4, trial.said
    assert "out of memory" in trial.one_line and "--optimizer.micro-batch-size" in trial.one_line
    assert trial.last.step == 1 and not list(trial.path.rglob(".postil-*"))
    trial.settings["optimizer"]["micro_batch_size"] = 512
    assert trial.whole().last.step == 2


# ## F10: NaN and infinity
def poisoned(update, value):
    r"""In a child: the loss stays finite, and one gradient is not."""

    def poison(session):
        parameter = session.model.generator.projection.weight
        parameter.register_hook(lambda gradient: gradient * value)

    at_update(update, poison)


@pytest.mark.case("BC101", "BC102")
@pytest.mark.parametrize("update, log_every", [(20, 20), (23, 20)], ids=["logging", "not logging"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(
    child, tmp_path, straight, update, log_every, value
):
    trial = Run(child, tmp_path, log_every=log_every)
    assert trial.start(before=lambda: poisoned(update, value)).wait(60) == 3, trial.said
    for part in (f"update {update}: loss ", "gradient norm", "in generator.projection.weight"):
        assert part in trial.one_line
    kept = trial.last
    assert kept.step == (update - 1) // SAVE_EVERY * SAVE_EVERY
    assert all(t.isfinite().all() for group in kept.tensors.values() for t in group.values())
    assert (trial.path / "checkpoints" / "step-00000015").exists(), "the best one is gone"
    trial.settings["log_every"] = 1
    assert trial.whole().last.metadata["progress"]["best"] == straight.last.metadata["progress"]["best"]


def test_a_run_that_lets_them_pass_is_found_out(child, tmp_path):
    trial = Run(child, tmp_path)

    def before():
        loop._refuse_non_finite = lambda *_: None
        poisoned(18, float("nan"))

    trial.whole(before=before)
    assert not all(t.isfinite().all() for t in trial.last.tensors["model"].values())


# ## F11: clocks
def test_a_clock_that_jumps_changes_nothing(child, tmp_path, straight):
    trial = Run(child, tmp_path)

    def jumping():
        real, days = time.time, iter(range(10**9))
        time.time = lambda: real() + 86400 * (-1) ** next(days)

    assert trial.whole(before=jumping).differs_from(straight) is None
    from postil.training.curves import read_metrics

    seconds = [line["seconds"] for line in read_metrics(trial.path / "metrics.jsonl")]
    assert seconds == sorted(seconds) and seconds[0] >= 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not shutil.which("faketime"), reason="needs faketime")
@pytest.mark.parametrize("shift", ["-1d", "+1d"])
def test_a_run_resumed_in_another_day_is_exact(child, tmp_path, straight, shift):
    trial = Run(child, tmp_path, updates=10).whole()
    for path, when in zip(checkpoints.steps(trial.path / "checkpoints"), (4102444800, 0), strict=True):
        os.utime(path, (when, when))
    trial.settings["updates"] = 30
    file = trial.path.with_suffix(".json")
    trial.start("--updates=10").wait(60)  # Writes the settings; nothing is left to train.
    command = ["faketime", "-f", shift, sys.executable, "-m", "postil.cli", "train"]
    done = subprocess.run(
        [*command, f"--config={file}", "--resume=auto"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert trial.differs_from(straight) is None


# ## F15: the token file changes under the run
def damage(how):
    def act(session):
        path = session.text.training_tokens.file.path
        data = path.read_bytes()
        if how == "truncated":
            os.truncate(path, len(data) // 2)
        elif how == "emptied":
            os.truncate(path, 0)
        elif how == "removed":
            path.unlink()
        else:
            path.write_bytes(bytes(reversed(data)))

    return act


@pytest.mark.case("BC081")
@pytest.mark.parametrize("how", ["truncated", "emptied", "removed", "replaced"])
def test_tokens_that_change_under_a_run_stop_it_cleanly(child, tmp_path, straight, how):
    trial = Run(child, tmp_path)
    assert trial.start(before=lambda: at_update(8, damage(how))).wait(60) == 2, trial.said
    assert "token file" in trial.one_line
    assert trial.last.step == 5
    assert trial.whole().differs_from(straight) is None


def test_a_reader_that_trusts_the_file_is_found_out(child, tmp_path, straight):
    trial = Run(child, tmp_path)

    def trusting():
        from postil.text import token_files

        token_files.TokenFile._verify = lambda self, file: setattr(self, "_stamp", None)
        at_update(8, damage("replaced"))

    assert trial.whole(before=trusting).differs_from(straight) is not None


# ## F17: nobody listens, or the log is full
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_training_goes_on_when_its_log_is_full(child, tmp_path, straight):
    trial = Run(child, tmp_path)
    trial.whole(output="/dev/full")
    assert trial.said.count("output cannot be written: No space left on device") == 1
    assert "Traceback" not in trial.said and "Exception ignored" not in trial.said
    assert trial.differs_from(straight) is None


def test_training_goes_on_when_its_reader_has_left(child, tmp_path, straight):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    trial = Run(child, tmp_path)
    trial.whole(output=pipe, before=lambda: os.close(reader) or closed_in_parent(reader))
    os.close(reader)
    assert trial.differs_from(straight) is None


def closed_in_parent(reader):
    r"""The parent's end is still open: a reader is left, so writing would succeed. Point output elsewhere."""
    ours, theirs = os.pipe()
    os.close(ours)
    os.dup2(theirs, 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_sample_that_cannot_be_written_says_so(child, straight, tmp_path):
    log = tmp_path / "log"

    def sampling():
        from postil.cli import main

        speak_into(log, "/dev/full")
        return main(["sample", str(straight.path), "--tokens=3"])

    assert child(sampling).wait() == 2
    said = log.read_text()
    assert "No space left on device" in said and said.count("\n") == 1 and "Traceback" not in said


# ## F18: soak
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_two_thousand_updates_leave_memory_files_threads_and_speed_as_they_were(child, tmp_path, figure):
    record = tmp_path / "record"

    def watched():
        original = sitting.train_update

        def update(session):
            result = original(session)
            pages = Path("/proc/self/statm").read_text().split()[1]
            files, threads = (len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("fd", "task"))
            with record.open("a") as file:
                file.write(f"{pages} {files} {threads} {time.process_time()}\n")
            return result

        sitting.train_update = update

    often = {"evaluate_every": 50, "save_every": 50, "sample_every": 50, "log_every": 50}
    code = Run(child, tmp_path, updates=2000, **often).start(before=watched).wait(1700)
    assert code == 0
    lines = torch.tensor([[float(x) for x in line.split()] for line in record.read_text().splitlines()])
    assert len(lines) == 2000
    memory, files, threads, seconds = lines.double().unbind(1)
    early, late = float(seconds[999] - seconds[499]), float(seconds[1999] - seconds[1499])
    grown = float(memory[1500:].max() / memory[500:1000].max())
    figure(updates=2000, memory=round(grown, 3), time=round(late / early, 3))
    assert memory[1500:].max() <= 1.05 * memory[500:1000].max()
    assert files[1500:].max() <= files[500:1000].max() and threads[1500:].max() <= threads[500:1000].max()
    # Processor time, since the wall clock also counts what other programs do.
    assert late <= 1.1 * early


# ## What is looked at before the lock is looked at again under it
@pytest.mark.case("BC106")
def test_a_checkpoint_saved_between_look_and_lock_is_not_overlooked(child, tmp_path, straight):
    trial = Run(child, tmp_path, updates=10).whole()
    trial.settings["updates"] = 30

    def meanwhile():
        original = run._prepare

        def prepare(*arguments):
            session = original(*arguments)
            newest = checkpoints.steps(trial.path / "checkpoints")[-1]
            shutil.copytree(newest, newest.with_name("step-00000012"))
            return session

        run._prepare = prepare

    assert trial.start(before=meanwhile).wait(60) == 2
    assert "another run saved checkpoints here just now" in trial.one_line
    shutil.rmtree(trial.path / "checkpoints" / "step-00000012")
    assert trial.whole().differs_from(straight) is None


def test_a_damaged_newest_checkpoint_is_kept_by_resume_auto(child, tmp_path, straight):
    trial = Run(child, tmp_path, updates=15).whole()
    newest = checkpoints.steps(trial.path / "checkpoints")[-1]
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    trial.settings["updates"] = 13
    trial.whole()
    assert newest.name in trial.said and "damaged" in trial.said
    assert (newest / "model.safetensors").read_bytes() == data
    trial.settings["updates"] = 30
    assert trial.whole().differs_from(straight) is None


@pytest.mark.case("BC134")
def test_a_run_without_a_folder_of_its_own_stays_under_runs(child, tmp_path):
    log = tmp_path / "log"

    def hostile():
        os.chdir(tmp_path)
        speak_into(log)
        from postil.cli import main

        (tmp_path / "config.json").write_text('{"experiment": "../outside", "updates": 1}')
        return main(["train", f"--config={tmp_path / 'config.json'}"])

    assert child(hostile).wait(30) == 2
    assert "name of the run '../outside'" in log.read_text()
    assert not (tmp_path / "outside").exists() and not (tmp_path.parent / "outside").exists()
