"""One small model for each registered mixer, with weights large enough that its texts differ."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from postil.integrations.huggingface import PretrainedModel
from postil.registry import REGISTRY
from postil.text.characters import Characters

ALPHABET = Characters("\n .abcdefghiklmno")


def make_model(mixer: str, **changes: Any) -> PretrainedModel:
    """Draw a model of the mixer's example settings; its greedy text is not one letter over and over."""
    settings = replace(REGISTRY[mixer].example, dropout=0.0, seq_len=32, **changes)
    torch.manual_seed(2)
    model = PretrainedModel(mixer=mixer, settings=asdict(settings), tokenizer=ALPHABET.to_dict()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model
