"""Every test that asks for `mixer` runs for all of the registry."""

from __future__ import annotations

import pytest

from postil.registry import REGISTRY


@pytest.fixture(params=list(REGISTRY))
def mixer(request: pytest.FixtureRequest) -> str:
    """Every name of the registry in turn."""
    return request.param
