r"""Beginning from the weights of another run.

A run of the same model hands over all its weights: training goes on, with a schedule and an optimizer of its
own. A Feedback Transformer may also begin as a trained parallel transformer
(`mixers/feedback/from_parallel`), which learns most of what there is to learn at a parallel model's price.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import Tensor

from postil.language_model import LanguageModel
from postil.mixers.feedback import from_parallel
from postil.mixers.feedback.attention import reachable
from postil.text import Tokenizer, fingerprint
from postil.training.saved import SavedRun, load_run
from postil.training.settings import TrainSettings

__all__ = ["begin_from"]

PARALLEL = "multi-head-attention"
SHARES_PROJECTIONS = {"feedback": True, "feedback-original": False}
"""The models that a parallel transformer can become, and whether their layers share keys and values."""

SHAPE = ("d_model", "n_layers", "heads", "d_ff", "activation", "tie_weights")


def begin_from(path: str, model: LanguageModel, settings: TrainSettings, tokenizer: Tokenizer) -> Any:
    r"""Copy the weights of the run in `path` into `model`; return what is to be recorded about it.

    Position tables that only one of two different models has stay as they are drawn, or are left behind. The
    tables of distances in a Feedback Transformer are lengthened or cut to what the new run can tell apart.

    Raises:
        CheckpointError: there is no good checkpoint in `path`.
        ValueError: the models are not alike enough; what differs is named.
    """
    saved = load_run(path)
    _check_alike(path, saved, settings, tokenizer)
    if saved.settings.mixer == settings.mixer:
        tensors = saved.model.state_dict()
    else:
        tensors = _as_feedback(saved.model.state_dict(), model, SHARES_PROJECTIONS[settings.mixer])
    own = model.state_dict()
    tensors = {name: _for_length(name, x, own.get(name)) for name, x in tensors.items()}
    other = [name for name in tensors if name in own and tensors[name].shape != own[name].shape]
    if other:
        raise ValueError(
            f"init_from={path!r}: {other[0]} is {list(tensors[other[0]].shape)} there and "
            f"{list(own[other[0]].shape)} here; give this run the sizes and options of that one"
        )
    model.load_state_dict(tensors, strict=saved.settings.mixer == settings.mixer)
    return {"path": path, "mixer": saved.settings.mixer, "update": saved.checkpoint.step}


# Short texts teach faster than long ones, and a run may follow in which the texts are longer. The farther
# distances begin as what the model has computed there so far: as the farthest that it could tell apart.
def _for_length(name: str, table: Tensor, like: Tensor | None) -> Tensor:
    if like is None or not name.endswith((".attn.key_pos_embeddings", ".attn.key_pos_bias")):
        return table
    return reachable(table, len(like))


# The number of heads changes what a model computes and no shape of a tensor; so settings are compared, and
# not tensors alone.
def _check_alike(path: str, saved: SavedRun, settings: TrainSettings, tokenizer: Tokenizer) -> None:
    there, here = saved.settings, settings
    if here.mixer != there.mixer and not (there.mixer == PARALLEL and here.mixer in SHARES_PROJECTIONS):
        raise ValueError(
            f"init_from={path!r} is a run of mixer={there.mixer!r}, and this one is of {here.mixer!r}: a run "
            f"begins from one of the same mixer, or a feedback model from {PARALLEL}"
        )
    own, others = asdict(here.model), asdict(there.model)
    own["d_ff"], others["d_ff"] = here.model.feed_forward_width, there.model.feed_forward_width
    differing = [
        f"{name}={others[name]} there, {own[name]} here" for name in SHAPE if own[name] != others[name]
    ]
    if differing:
        raise ValueError(f"init_from={path!r} is a model of another shape: {'; '.join(differing)}")
    if fingerprint(saved.tokenizer) != fingerprint(tokenizer):
        raise ValueError(
            f"init_from={path!r} was trained with another vocabulary ({saved.tokenizer.vocab_size} "
            f"{saved.tokenizer.kind} there, {tokenizer.vocab_size} {tokenizer.kind} here): its tokens mean "
            f"other things; take the same text and tokenizer"
        )


def _as_feedback(tensors: dict[str, Tensor], model: LanguageModel, shared: bool) -> dict[str, Tensor]:
    inside = "backbone."
    layers = {name.removeprefix(inside): x for name, x in tensors.items() if name.startswith(inside)}
    turned = {inside + name: x for name, x in from_parallel(layers, shared=shared).items()}
    around = {name: x for name, x in tensors.items() if not name.startswith(inside)}
    own = model.state_dict()
    # A bias of all heads in one row is here one row a head.
    return {
        name: x.view_as(own[name]) if name.endswith("query_pos_bias") else x
        for name, x in (around | turned).items()
        if name in own
    }
