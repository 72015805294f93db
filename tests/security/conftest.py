r"""A small run to attack, and the command line to attack it with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from postil.cli import main


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of two updates; tests copy it before they damage it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("the fox saw the hen and the hen saw no fox. " * 50)
    settings = {
        "text": str(folder / "text.txt"),
        "out": str(folder / "run"),
        "updates": 2,
        "sample_every": 0,
        "prompt": "the ",
        "threads": 1,
        "model": {"d_model": 8, "n_layers": 1, "heads": 2, "seq_len": 8},
        "optimizer": {"batch_size": 2, "warmup": 1, "schedule": "constant"},
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POSTIL_CACHE", str(folder / "cache"))
        assert main(["train", f"--config={folder / 'settings.json'}"]) == 0
    return folder / "run"


@pytest.fixture(autouse=True)
def own_folders(own_folders: Path) -> Path:
    return own_folders


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]):
    """Run a command that must be refused: code 2, one line of error, no traceback; give the line."""

    def run(*argv: str) -> str:
        capsys.readouterr()
        try:
            code = main(list(argv))
        except SystemExit as leaving:
            code = leaving.code
        said = capsys.readouterr().err
        errors = [line for line in said.splitlines() if ": error: " in line]
        assert code == 2 and len(errors) == 1 and "Traceback" not in said, (code, said)
        assert len(errors[0]) < 2000
        return errors[0]

    return run
