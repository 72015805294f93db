"""The command line as a person meets it: what it prints, its exit codes, and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from postil.cli import main
from postil.cli.flags import with_underscores

TINY = [
    "--model.d_model=16",
    "--model.n_layers=1",
    "--model.heads=2",
    "--model.seq_len=16",
    "--optimizer.batch_size=4",
    "--optimizer.warmup=2",
    "--sample-tokens=4",
    "--prompt=the ",
    "--threads=1",
]


pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the fox saw the hen and the hen saw no fox. " * 100)
    return path


@pytest.fixture
def trained(text: Path, tmp_path: Path) -> Path:
    out = tmp_path / "run"
    assert main(["train", f"--text={text}", "--updates=4", f"--out={out}", *TINY]) == 0
    return out


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must fail as a mistake of the user: code 2, one line, no traceback."""
    assert main(list(argv)) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and "Traceback" not in shown.err
    return shown.err


def test_help_and_unknown_commands(capsys) -> None:
    assert main([]) == 0
    assert "postil train --experiment transformer" in capsys.readouterr().out
    assert "'trian' is not a command; there are train, sample" in fails(capsys, "trian")
    assert main(["--version"]) == 0


def test_options_with_dashes_or_underscores() -> None:
    given = ["--max-time=5", "--model.d-model", "16", "-h", "a-b", "--prompt=a-b"]
    assert with_underscores(given) == ["--max_time=5", "--model.d_model", "16", "-h", "a-b", "--prompt=a-b"]


def test_train_sample_info(trained: Path, capsys) -> None:
    assert main(["info", str(trained)]) == 0
    shown = capsys.readouterr().out
    assert "unigram entropy" in shown and "bits per character at update 4" in shown
    assert main(["sample", str(trained), "--prompt", "the ", "--tokens", "5", "--temperature", "0"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("the ") and len(first) == len("the ") + 5 + 1
    assert main(["sample", str(trained), "--prompt=the ", "--tokens=5", "--temperature=0", "--seed=7"]) == 0
    assert capsys.readouterr().out == first


def test_a_run_on_programs_answers_a_prompt(tmp_path: Path, capsys) -> None:
    out = tmp_path / "programs"
    sizes = ["--model.seq_len=40", "--data.statements=6", "--data.variables=2", "--seq_len_from=20"]
    assert main(["train", "--experiment=algorithmic", f"--out={out}", "--updates=2", *TINY[:3], *sizes]) == 0
    shown = capsys.readouterr().out
    assert "bits per printed value" in shown and "% right; the run is in" in shown
    assert main(["info", str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "programs, 25 kinds, without end for training" in shown
    assert "bits per printed value at update 2" in shown and "% right" in shown
    prompt = "x = 4 ; y = 2 ; x ++ ; print x"
    assert main(["sample", str(out), "--prompt", prompt, "--temperature=0"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(prompt + " ") and len(said.split()) == len(prompt.split()) + 1
    assert "'w' at position 0" in fails(capsys, "sample", str(out), "--prompt", "w = 4 ; print w")


def test_pictures_have_a_command_of_their_own(capsys) -> None:
    error = fails(capsys, "train", "--experiment", "aft-images")
    assert "python -m postil.experiments.aft_images" in error


def test_info_without_a_run_says_which_form_computes(capsys) -> None:
    assert main(["info"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "multi-head-attention" in shown
    assert "compiled kernel" in shown or "plain PyTorch form" in shown


def test_a_prompt_from_a_file_and_from_standard_input(trained: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes("\ufeffthe\r\nfox".encode())
    command = [sys.executable, "-m", "postil.cli", "sample", str(trained), "--tokens=3", "--temperature=0"]
    # The text has no newline, so the vocabulary has none either: the reading rule made one of \r\n.
    done = subprocess.run([*command, f"--prompt-file={prompt}"], capture_output=True, text=True)
    assert done.returncode == 2 and "U+000A" in done.stderr
    done = subprocess.run([*command, "--prompt-file=-"], capture_output=True, input=b"the fox")
    assert done.returncode == 0 and done.stdout.startswith(b"the fox")


@pytest.mark.case("BC079")
def test_an_unknown_character_in_the_prompt(trained: Path, capsys) -> None:
    error = fails(capsys, "sample", str(trained), "--prompt", "the éfox")
    assert "'é' (U+00E9) at position 4" in error


@pytest.mark.case("BC033")
def test_impossible_sizes_leave_no_folder(text: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "other"
    start = ["train", f"--text={text}", "--updates=4", f"--out={out}"]
    assert "d_model=30 must be divisible by heads=4" in fails(
        capsys, *start, "--model.d_model=30", "--model.heads=4", "--model.seq_len=16"
    )
    assert "heads=0" in fails(capsys, *start, *TINY, "--model.heads=0")
    assert "dropout=1.5" in fails(capsys, *start, *TINY, "--model.dropout=1.5")
    assert "--updates: 'x' is not int" in fails(capsys, *start[:2], "--updates=x")
    assert "--model.depth" in fails(capsys, *start, "--model.depth=4")
    assert "experiment='nope'" in fails(capsys, "train", "--experiment", "nope")
    assert "options={'windows': 3} do not fit" in fails(
        capsys, *start, *TINY, '--model.options={"windows": 3}'
    )
    assert not out.exists()


@pytest.mark.case("BC087", "BC090")
@pytest.mark.parametrize("content", ["", "\ufeff", "\n", "ten chars."])
def test_texts_that_are_too_small(content: str, tmp_path: Path, capsys) -> None:
    path, out = tmp_path / "small.txt", tmp_path / "other"
    path.write_text(content)
    error = fails(capsys, "train", f"--text={path}", "--updates=2", f"--out={out}", *TINY)
    assert "small.txt" in error or (
        "10 tokens" in error and "seq_len=16" in error and "smallest usable" in error
    )
    assert not out.exists()


@pytest.mark.case("BC105")
def test_a_second_run_in_the_same_folder_is_refused(trained: Path, text: Path, capsys) -> None:
    before = (trained / "metrics.jsonl").read_bytes()
    start = ["train", f"--text={text}", "--updates=6", f"--out={trained}", *TINY]
    error = fails(capsys, *start)
    assert "--resume" in error and "--overwrite" in error
    assert (trained / "metrics.jsonl").read_bytes() == before
    assert main([*start, "--overwrite"]) == 0
    assert main(["train", f"--out={trained}", "--resume=auto", "--updates=8"]) == 0


def test_a_resumed_run_takes_its_settings_from_its_record(trained: Path, capsys) -> None:
    capsys.readouterr()
    assert main(["train", f"--out={trained}", "--resume", "auto", "--updates", "6"]) == 0
    assert "resuming from update 4" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["yaml", "toml", "json"])
def test_a_configuration_file_under_flags(suffix: str, text: Path, tmp_path: Path) -> None:
    import json

    config, out = tmp_path / f"config.{suffix}", tmp_path / "run"
    values = {"updates": 9, "seed": 5, "model": {"d_model": 16, "heads": 2, "n_layers": 1, "seq_len": 16}}
    if suffix == "toml":
        config.write_text(
            "updates = 9\nseed = 5\n[model]\nd_model = 16\nheads = 2\nn_layers = 1\nseq_len = 16\n"
        )
    else:
        config.write_text(yaml.safe_dump(values) if suffix == "yaml" else json.dumps(values))
    command = [
        "train",
        f"--config={config}",
        f"--text={text}",
        f"--out={out}",
        "--updates=2",
        "--prompt=the ",
    ]
    assert main([*command, "--optimizer.batch_size=2", "--optimizer.lr=1e-3"]) == 0
    record = json.loads((out / "run.json").read_text())["settings"]
    assert record["updates"] == 2 and record["seed"] == 5 and record["model"]["d_model"] == 16
    assert record["optimizer"]["lr"] == 1e-3


@pytest.mark.case("BC060")
def test_a_configuration_is_data_only(tmp_path: Path, capsys) -> None:
    marker, config = tmp_path / "marker", tmp_path / "config.yaml"
    config.write_text(f"updates: !!python/object/apply:os.system ['touch {marker}']\n")
    fails(capsys, "train", f"--config={config}")
    config.write_text("updates: 2\ncolour: red\n")
    assert "colour" in fails(capsys, "train", f"--config={config}")
    assert not marker.exists()


def test_the_configuration_can_be_printed(capsys) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["train", "--experiment=transformer", "--print-config"])
    assert leaving.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["d_model"] == 256 and printed["optimizer"]["schedule"] == "noam"


def test_data_shows_what_a_text_is(text: Path, capsys) -> None:
    assert main(["data", str(text)]) == 0
    assert "unigram entropy" in capsys.readouterr().out
    assert "no-such-text" in fails(capsys, "data", "no-such-text")


@pytest.mark.case("BC059")
def test_what_is_not_a_run_is_refused(tmp_path: Path, capsys) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "empty" in fails(capsys, "sample", str(empty))
    assert "not the folder of a run" in fails(capsys, "info", str(empty))
    for name in ("../../etc", "/etc/hostname"):
        assert main(["sample", name]) == 2


def test_output_into_a_closed_pipe(trained: Path) -> None:
    command = f"{sys.executable} -m postil.cli sample {trained} --tokens=300 --prompt='the ' | head -c 5"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("the ") and len(done.stdout) == 5
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.case("BC108")
def test_an_interrupted_command_leaves_with_the_signals_code(text: Path, tmp_path: Path) -> None:
    import signal
    import time

    out = tmp_path / "long"
    command = [
        sys.executable,
        "-m",
        "postil.cli",
        "train",
        f"--text={text}",
        f"--out={out}",
        "--max-time=300",
        *TINY,
    ]
    process = subprocess.Popen(
        [*command, "--optimizer.schedule=constant"], stdout=subprocess.DEVNULL, env={**os.environ}
    )
    metrics, deadline = out / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert main(["train", f"--out={out}", "--resume=auto", "--max-time=0.01"]) == 0


def test_a_lost_rank_is_named_in_one_line(capsys, monkeypatch) -> None:
    from postil.cli import info
    from postil.training.processes import RankError

    def lose(argv: list[str]) -> int:
        raise RankError("rank 1 was lost: out of memory")

    monkeypatch.setattr(info, "run", lose)
    assert main(["info"]) == 5
    assert capsys.readouterr().err == "postil info: error: rank 1 was lost: out of memory\n"
