r"""Configurations, names and texts that try to be more than data."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import postil
from postil.cli import main

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
CONFIGURATIONS = {
    "an alias bomb": (BOMB, "anchors and aliases"),
    "a merge": ("a: &a {updates: 1}\n<<: *a\n", "anchors and aliases"),
    "a tag that runs": ("updates: !!python/object/apply:os.mkdir ['marker']\n", "the tag"),
    "a tag that names": ("updates: !!python/name:os.system\n", "the tag"),
    "a tag of YAML": ("updates: !!binary aGVsbG8=\n", "the tag"),
    "a key twice": ("updates: 1\nupdates: 2\n", "'updates' is set twice"),
    "a key twice in JSON": ('{"updates": 1, "updates": 2}', "'updates' is set twice"),
    "a nested key twice": ("model:\n  d_model: 8\n  d_model: 16\n", "line 3: 'd_model' is set twice"),
    "an unknown key": ("updates: 1\ncolour: red\n", "colour"),
    "an unknown nested key": ("model:\n  colour: red\n", "colour"),
    "a wrong type": ("updates: many\n", "updates"),
    "a list for a number": ("updates: [1, 2]\n", "updates"),
    "a list as a key": ("? [a, b]\n: 1\n", "a key must be a plain name"),
    "a nest": ("[" * 100_000, "nested"),
    "a nest of mappings": ("{a: " * 1000, "nested"),
    "no YAML": ("updates: [1\n", "line"),
    "no text": ("\0", "config"),
    "two documents": ("updates: 1\n---\nupdates: 2\n", "config"),
}


@pytest.mark.case("BC060")
@pytest.mark.parametrize("attack", CONFIGURATIONS)
def test_a_configuration_is_plain_data_once(tmp_path: Path, refused, attack: str) -> None:
    content, expected = CONFIGURATIONS[attack]
    file = tmp_path / "config.yaml"
    file.write_text(content)
    assert expected in refused("train", f"--config={file}")
    assert expected in refused("train", "--config", str(file))
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.case("BC060")
def test_other_forms_of_a_configuration(tmp_path: Path, refused) -> None:
    toml = tmp_path / "config.toml"
    toml.write_text("updates = 1\nupdates = 2\n")
    assert str(toml) in refused("train", f"--config={toml}")
    huge = tmp_path / "huge.yaml"
    huge.touch()
    os.truncate(huge, 2**30)
    assert "more than the 1048576 allowed" in refused("train", f"--config={huge}")
    assert "no-such" in refused("train", "--config=no-such.yaml")
    assert "not a regular file" in refused("train", "--config=/dev/zero")
    # The environment is not asked, and a second file is looked at as closely as the first.
    second = tmp_path / "second.yaml"
    second.write_text("updates: 1\nupdates: 2\n")
    (tmp_path / "first.yaml").write_text("seed: 2\n")
    assert "set twice" in refused("train", f"--config={tmp_path / 'first.yaml'}", f"--config={second}")
    (tmp_path / "secret.yaml").write_text("text: ${HOME}\nupdates: 1\n")
    assert "${HOME}" in refused("train", f"--config={tmp_path / 'secret.yaml'}")


def test_a_number_in_scientific_notation_is_a_number(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.yaml").write_text("optimizer:\n  lr: 1e-3\n")
    with pytest.raises(SystemExit):
        main(["train", f"--config={tmp_path / 'config.yaml'}", "--print_config"])
    assert "lr: 0.001" in capsys.readouterr().out


NAMES = [
    "../x",
    "a/../../x",
    "/etc/x",
    "..",
    "x\n",
    "\x1b[31mx",
    "a" * 5000,
    "x\0y",
    "~/x",
    "C:\\x",
    "．．／x",
]


# A folder that a person names is theirs to name. What names something inside ours is held to the allow-list.
@pytest.mark.case("BC134")
@pytest.mark.parametrize("name", NAMES)
def test_names_lead_nowhere(tmp_path: Path, trained: Path, refused, name: str) -> None:
    before = sorted(tmp_path.parent.iterdir())
    for command in (
        ["train", "--updates=1", f"--mixer={name}"],
        ["train", "--updates=1", f"--experiment={name}"],
        ["train", "--updates=1", f"--text={name}"],
        ["train", "--updates=1", f"--data.tokenizer={name}"],
        ["sample", str(trained), f"--checkpoint={name}"],
        ["export", str(trained), "--to=torch", "--out=out", f"--checkpoint={name}"],
        ["sample", name],
        ["info", name],
        ["data", name],
    ):
        said = refused(*command)
        assert "\x1b" not in said, command
    assert sorted(tmp_path.parent.iterdir()) == before and not list(tmp_path.iterdir())


# The text that a model writes, and every name that an error repeats, goes to a terminal.
ESCAPE = "\x1b]0;title\x07\x1b[2J"


def on_a_terminal(*argv: str) -> str:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "postil.cli", *argv], stdout=theirs, stderr=theirs, stdin=theirs
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    process.wait(60)
    return shown.decode(errors="replace")


@pytest.mark.skipif(os.name == "nt", reason="needs pseudo-terminals")
def test_a_terminal_is_shown_control_characters_and_a_file_gets_them(tmp_path: Path, capsys) -> None:
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text(ESCAPE * 60)
    tiny = ["--model.d_model=8", "--model.n_layers=1", "--model.heads=1", "--model.seq_len=8"]
    more = ["--optimizer.batch_size=2", "--optimizer.schedule=constant", "--threads=1", f"--prompt={ESCAPE}"]
    assert main(["train", f"--text={text}", f"--out={run}", "--updates=1", *tiny, *more]) == 0
    assert "\x1b" not in capsys.readouterr().out
    shown = on_a_terminal("sample", str(run), "--tokens=20")
    assert "\x1b" not in shown and "\x07" not in shown and "\\x1b]0;title\\x07" in shown
    assert main(["sample", str(run), "--tokens=20"]) == 0
    assert capsys.readouterr().out.startswith(ESCAPE)


def test_error_messages_hold_no_control_characters(refused) -> None:
    for command in (
        ["sample", ESCAPE],
        ["info", ESCAPE],
        ["train", "--updates=1", f"--text={ESCAPE}"],
        ["data", ESCAPE],
    ):
        said = refused(*command)
        assert "\x1b" not in said and "\x07" not in said


OFFLINE = """
import socket, sys
def refuse(*arguments, **options):
    raise AssertionError("the network was asked")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
import importlib, pkgutil, postil
failed = []
for module in pkgutil.walk_packages(postil.__path__, "postil."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        failed.append(str(error))
print(len([name for name in sys.modules if name.startswith("postil.")]))
"""


def test_importing_every_module_asks_no_network_and_writes_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], capture_output=True, text=True, cwd=tmp_path, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 80
    assert not list(tmp_path.iterdir())


def test_the_wheel_pins_what_it_needs_from_below() -> None:
    project = (Path(postil.__file__).parents[2] / "pyproject.toml").read_text()
    needed = project.partition("\ndependencies = [")[2].partition("\n]")[0].split("\n")
    assert all(">=" in line for line in needed if line.strip())
