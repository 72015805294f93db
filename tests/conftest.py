"""Shapes in signatures are checked while tests run; one thread, so that equal means equal."""

import json
import os
import re
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from jaxtyping import install_import_hook

install_import_hook("postil", "shape_check.check")

import pytest
import torch
from hypothesis import settings

# A shell starts background jobs with interrupts ignored, and what is ignored stays so in every child.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no fault of the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers, alone or in company."""
    torch.manual_seed(0)


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep a test out of the folders of the person who runs it; give the cache it has instead."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("POSTIL_CACHE", str(cache))
    monkeypatch.delenv("POSTIL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    return cache


@pytest.fixture
def figure(request: pytest.FixtureRequest):
    """Keep what a test counted or measured, for `docs/make_reliability.py --figures`: `figure(kills=50)`."""
    found: dict[str, float] = {}
    yield found.update
    if found:
        name = re.sub(r"[^A-Za-z0-9]+", "-", request.node.nodeid)
        file = Path(request.config.rootpath) / ".pytest_cache" / "figures" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"test": request.node.nodeid, **found}))
