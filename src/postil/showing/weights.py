r"""The weights of a model on one text, computed anew beside the model.

A fast form never holds its weights: that is why it is fast. So the model runs as always, what each mixer was
given is noted on the way, and the weights are computed from it by the equation of the mixer's own page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from postil.language_model import LanguageModel
from postil.masks import Mask, dense_mask
from postil.mixers.aft import AFTConv, AFTConv2d, AFTFull, AFTLocal, AFTSimple
from postil.mixers.aft.conv import KernelLayer, conv_bias
from postil.mixers.aft.conv2d import image_bias
from postil.mixers.aft.layer import AFTLayer
from postil.mixers.aft.local import local_bias
from postil.mixers.feedback import FeedbackAttention
from postil.mixers.multi_head_attention import MultiHeadAttention
from postil.sampling import evaluating

__all__ = ["Picture", "pictures"]

CHANNELS = 4
CAUSAL = Mask(causal=True)


@dataclass(frozen=True)
class Picture:
    r"""One matrix to look at.

    `kind` groups pictures of one sort, `part` tells them apart within a layer (a head, a channel). Rows and
    columns are positions of the text where `over_text` says so; otherwise `columns` names them. `layer`
    counts from 1; 0 stands for the whole model.
    """

    kind: str
    layer: int
    part: str
    values: Float[Tensor, "rows columns"]
    over_text: bool = True
    columns: tuple[str, ...] = ()

    @property
    def signed(self) -> bool:
        r"""True for biases, which may be negative and have no sum; weights of a row sum to 1."""
        return self.kind == "position biases"


def pictures(model: LanguageModel, ids: Int[Tensor, "T"]) -> list[Picture]:
    r"""Give all pictures of a model for one text.

    Cost: $T^2$ numbers a head, or $T^2 D$ for a moment in the AFT family.

    Raises:
        ValueError: the text has fewer than two tokens or does not fit the model, or no mixer in the model is
            one whose weights are known here.
    """
    if len(ids) < 2:
        raise ValueError("the text has fewer than two tokens: there is nothing that could be read; give more")
    backbone: Any = model.backbone
    if any(isinstance(module, FeedbackAttention) for module in backbone.modules()):
        return _feedback(model, backbone, ids)
    mixers = [m for m in backbone.modules() if isinstance(m, MultiHeadAttention | AFTLayer)]
    if not mixers:
        raise ValueError(f"{type(backbone).__name__} has no mixer whose weights can be shown")
    with _noting(mixers) as notes, evaluating(model):
        model(ids[None])
        return [p for n, (mixer, given) in enumerate(notes, start=1) for p in _of_mixer(mixer, n, given)]


# A hook notes the very tensors that a layer hands to its mixer, so nothing here has to know what a layer does
# before.
@contextmanager
def _noting(modules: list[Any]) -> Iterator[list[tuple[Any, dict[str, Tensor]]]]:
    notes: list[tuple[Any, dict[str, Tensor]]] = []

    def note(module: nn.Module, _: Any, given: dict[str, Any]) -> None:
        notes.append((module, given))

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    try:
        yield notes
    finally:
        for hook in hooks:
            hook.remove()


def _of_mixer(mixer: Any, layer: int, given: dict[str, Tensor]) -> list[Picture]:
    x = given["query"]
    if isinstance(mixer, MultiHeadAttention):
        weights = mixer.weights(query=x, key=x, mask=CAUSAL)[:, :, 0]
        return _by_head("attention", layer, weights)
    return _aft(mixer, layer, x)


def _by_head(kind: str, layer: int, weights: Float[Tensor, "T S H"]) -> list[Picture]:
    return [Picture(kind, layer, f"head {h + 1}", weights[:, :, h]) for h in range(weights.shape[2])]


# ## The Attention Free Transformer
#
# Its weights are $e^{K_s + w_{t,s}}$ over their sum, and a query has no word in them. AFT-conv shares them
# within a head; elsewhere every channel has its own, too many to look at. So their mean is shown, and the
# channels whose keys vary most, for those are the ones that choose.
def _aft(mixer: AFTLayer, layer: int, x: Float[Tensor, "T 1 D"]) -> list[Picture]:
    k = mixer.operands(query=x, key=x, value=x, mask=CAUSAL)[1][:, 0]
    bias = _position_biases(mixer, len(x))
    logits = k[None] if bias is None else k[None] + bias
    allowed = dense_mask(CAUSAL, len(x), len(x), x.device)
    weights = logits.expand(len(x), -1, -1).masked_fill(~allowed, -math.inf).softmax(dim=1)
    if isinstance(mixer, KernelLayer):
        shown = _by_head("AFT weights", layer, weights)
    else:
        chosen = k.std(dim=0).topk(min(CHANNELS, k.shape[1])).indices.tolist()
        shown = [Picture("AFT weights", layer, "mean of all channels", weights.mean(dim=2))]
        shown += [Picture("AFT weights", layer, f"channel {c + 1}", weights[:, :, c]) for c in chosen]
    if bias is not None:
        seen = bias.masked_fill(~allowed, 0.0)
        if isinstance(mixer, KernelLayer):
            shown += _by_head("position biases", layer, seen)
        else:
            shown.append(Picture("position biases", layer, "all channels", seen[:, :, 0]))
    return shown


def _position_biases(mixer: AFTLayer, length: int) -> Float[Tensor, "T S heads"] | None:
    if isinstance(mixer, AFTSimple):
        return None
    if isinstance(mixer, AFTConv):
        return conv_bias(mixer.biases(), mixer.centre, length, length).permute(1, 2, 0)
    if isinstance(mixer, AFTConv2d):
        at = torch.arange(length, device=mixer.biases().device)
        return image_bias(mixer.biases(), mixer.width, at, at).permute(1, 2, 0)
    if isinstance(mixer, AFTLocal):
        return local_bias(mixer.pos_bias, length, length)[:, :, None]
    if isinstance(mixer, AFTFull):
        return mixer.position_biases(length, length)[:, :, None]
    raise ValueError(f"{type(mixer).__name__} has weights that are not known here")


# ## The Feedback Transformer
#
# Here time is walked through, so the notes come one for each step and layer. Row $t$ of a picture holds what
# step $t$ read of the memories before it. The first step has none to read.
def _feedback(model: LanguageModel, backbone: Any, ids: Tensor) -> list[Picture]:
    attentions = [layer.attn for layer in backbone.layers]
    weights = [torch.zeros(len(ids), len(ids), backbone.heads) for _ in attentions]
    with evaluating(model):
        _, state = model.step(ids[:1])
        for t in range(1, len(ids)):
            with _noting(attentions) as notes:
                _, state = model.step(ids[t : t + 1], state)
            for layer, (attention, given) in enumerate(notes):
                read = _read(attention, given)
                weights[layer][t, t - len(read) : t] = read
        mixing = backbone.mixing().detach()
    names = ("input", *(f"layer {n}" for n in range(1, len(attentions) + 1)))
    memory = Picture("what a memory is made of", 0, "weights of layers", mixing[None], False, names)
    return [memory, *(p for n, w in enumerate(weights, start=1) for p in _by_head("memory attention", n, w))]


def _read(attention: FeedbackAttention, given: dict[str, Tensor]) -> Float[Tensor, "S H"]:
    q, key = attention.query(given["query"]), given["key"]
    # The original projects memory vectors itself where it is given no keys.
    k = key if key.dim() == 4 or attention.key is None else attention.key(key)
    scores = attention.get_scores(q, k) / math.sqrt(attention.d_k)
    return scores.softmax(dim=0)[:, 0].cpu()
