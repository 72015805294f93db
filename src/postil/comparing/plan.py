r"""Who takes part, and on which terms."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from postil.durable import check_name
from postil.registry import build_language_model
from postil.training.data import find_corpus, prepare_text
from postil.training.settings import TrainSettings

__all__ = ["Contender", "count_parameters", "plan"]


@dataclass(frozen=True)
class Contender:
    r"""One model of a comparison: its name there, and what its runs are trained with, seeds apart."""

    name: str
    settings: TrainSettings
    parameters: int

    def with_seed(self, seed: int, folder: str) -> TrainSettings:
        r"""Give the settings of one run."""
        return replace(self.settings, seed=seed, out=folder)


def plan(settings: dict[str, TrainSettings], *, equal_parameters: bool = False) -> list[Contender]:
    r"""Check that the contenders can be compared, and give them their final shapes.

    With `equal_parameters` all but the first get the `d_ff` that brings them nearest to its size.

    Raises:
        ValueError: the budget is missing or means different things to different contenders, or no `d_ff`
            gives the wanted number of parameters.
        TextError: the text cannot be used.
    """
    if len(settings) < 1:
        raise ValueError("nothing to compare: name experiments or mixers, such as transformer aft-local")
    for name in settings:
        check_name(name, "contender")
    _check_budget(settings)
    contenders: list[Contender] = []
    for name, own in settings.items():
        # Samples written during training would count as training, most for the model that writes slowest.
        own = replace(own, sample_every=0)
        own.check()
        # The default text is looked up once and named, so that a resumed comparison cannot find another.
        corpus = find_corpus(own)
        own = replace(own, text=own.text or corpus.name)
        vocab_size = prepare_text(own, corpus).tokenizer.vocab_size
        if equal_parameters and contenders:
            own = _resized(name, own, vocab_size, contenders[0].parameters)
        contenders.append(Contender(name, own, count_parameters(own, vocab_size)))
    return contenders


# Updates are a budget only if an update is the same number of tokens for all.
def _check_budget(settings: dict[str, TrainSettings]) -> None:
    first = next(iter(settings.values()))
    if first.updates is None and first.epochs is None and first.max_tokens is None and first.max_time is None:
        raise ValueError(
            "a comparison needs a budget, the same for all: give --max-tokens or --max-time (in seconds)"
        )
    sizes = {name: own.tokens_per_update for name, own in settings.items()}
    if first.updates is not None and len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"updates={first.updates} are not the same budget for all: tokens in an update are {shown}; give "
            f"--max-tokens, or --model.seq_len and --optimizer.batch_size for all"
        )
    texts = {own.text for own in settings.values() if own.text is not None}
    if len(texts) > 1:
        raise ValueError(f"contenders have different texts, {', '.join(sorted(texts))}: give --text for all")
    if len({(own.data.tokenizer, own.data.vocab_size) for own in settings.values()}) > 1:
        raise ValueError("contenders have different tokenizers: give --data.tokenizer for all")


def count_parameters(settings: TrainSettings, vocab_size: int) -> int:
    r"""Count the parameters of a model without making room for them."""
    with torch.device("meta"):
        model = build_language_model(settings.mixer, settings.model, vocab_size)
    return sum(parameter.numel() for parameter in model.parameters())


# The feed-forward part is the one piece that all models have and that says nothing of how positions are
# mixed. The number of parameters is a straight line over its width: two points on it give the width.
def _resized(name: str, settings: TrainSettings, vocab_size: int, wanted: int) -> TrainSettings:
    def at(width: int) -> TrainSettings:
        return replace(settings, model=replace(settings.model, d_ff=width))

    one, two = (count_parameters(at(width), vocab_size) for width in (1, 2))
    width = 1 + round((wanted - one) / (two - one))
    if width < 1:
        raise ValueError(
            f"{name} has {one:,} parameters even with d_ff=1, more than the {wanted:,} of the first: name "
            f"the largest model first, or leave --equal-parameters away"
        )
    return at(width)
