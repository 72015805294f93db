# ruff: noqa: E501  (payloads and programs in strings are read whole)
import subprocess
import sys

import pytest

from postil.pages.cli import main

from .making import project_of


def test_build_check_and_translate(tmp_path, capsys):
    project_of(tmp_path, {"one.py": '"""One."""\n'})
    site = str(tmp_path / "site")
    assert main(["build", str(tmp_path / "pkg"), "--out", site]) == 0
    assert "1 pages; 1 written" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "pkg")]) == 0
    assert main(["check", str(tmp_path / "pkg"), "--languages", "ja"]) == 1
    assert main(["check", str(tmp_path / "pkg"), "--languages", "ja", "--partial"]) == 0
    assert main(["translate", "update", str(tmp_path / "pkg"), "--languages", "ja"]) == 0
    assert (tmp_path / "locale/ja/LC_MESSAGES/one.po").is_file()
    assert main(["translate", "progress", str(tmp_path / "pkg"), "--languages", "ja"]) == 0
    assert "ja: 0 of 1 blocks" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["build", "gone", "--out", "x"], ["serve", "gone"], ["check", "gone"]])
def test_bad_usage_is_one_line(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_faults_name_file_and_line(tmp_path, capsys):
    project_of(tmp_path, {"one.py": "# $\\frac{a$\nx = 1\n"})
    assert main(["build", str(tmp_path / "pkg"), "--out", str(tmp_path / "site")]) == 1
    assert capsys.readouterr().err.startswith("pkg/one.py:1: mathematics: ")


def test_control_characters_do_not_reach_a_terminal(tmp_path, capsys):
    project_of(tmp_path, {"a\x1b[31m.py": "# $\\frac{a$\nx = 1\n"})
    assert main(["build", str(tmp_path / "pkg"), "--out", str(tmp_path / "site")]) == 1
    assert "\x1b" not in capsys.readouterr().err


def test_the_module_runs():
    done = subprocess.run(
        [sys.executable, "-m", "postil.pages", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "translate" in done.stdout


def test_the_publisher_stands_alone():
    code = "import sys, postil.pages.cli; print([m for m in sys.modules if m.startswith('postil.') and not m.startswith('postil.pages')], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"
