"""The suite of decoding takes every model of the registry."""

from __future__ import annotations

import pytest

import decode
from postil.registry import REGISTRY


@pytest.mark.parametrize("mixer", REGISTRY)
def test_every_model_writes_on(mixer):
    step = decode.stepping(mixer, 3)
    for _ in range(2):
        step()
