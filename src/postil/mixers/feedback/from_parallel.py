r"""Starting from a parallel transformer.

Most of what a transformer learns it can learn in parallel. A trained one is a good place to start a Feedback
Transformer from: layer norms, feed-forward networks, queries and outputs mean the same in both, and each
layer's keys and values are at least keys and values of *something* below it.

What is new starts at its usual place: the memory mixes all layers evenly, and no distance is preferred yet.
The bias of the old queries becomes $u$, which is added to a query as well. The bias of the old keys is
dropped; it added the same number to all scores of a query, which the softmax took away.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["from_parallel"]

SAME = ("norm_self_attn.weight", "norm_self_attn.bias", "norm_ff.weight", "norm_ff.bias")


def from_parallel(state_dict: Mapping[str, Tensor], *, shared: bool = True) -> dict[str, Tensor]:
    r"""Turn the state dict of a `CausalStack` of `MultiHeadAttention` layers into one for a backbone here.

    With `shared`, for `FeedbackTransformerKV`: the shared projections are the means over the layers. Without,
    for `FeedbackTransformer`: each layer keeps its own. Position tables and mixture are not in the result and
    stay as the new model has them: load it with `strict=False`.

    Raises:
        ValueError: there are no such layers in `state_dict`.
    """
    layers = sorted({int(name.split(".")[1]) for name in state_dict if name.startswith("layers.")})
    if not layers or f"layers.{layers[0]}.self_attn.query.linear.weight" not in state_dict:
        raise ValueError("the state dict has no layers.N.self_attn: it is not of a parallel transformer")
    result = {name: state_dict[name] for name in ("norm.weight", "norm.bias")}
    for layer in layers:
        old, new = f"layers.{layer}.self_attn.", f"layers.{layer}.attn."
        for name, tensor in state_dict.items():
            rest = name.removeprefix(f"layers.{layer}.")
            if rest != name and (rest in SAME or rest.startswith("feed_forward.")):
                result[name] = tensor
        for part in ("query.linear.weight", "output.weight", "output.bias"):
            result[new + part] = state_dict[old + part]
        if (bias := state_dict.get(old + "query.linear.bias")) is not None:
            result[new + "query_pos_bias"] = bias
        if not shared:
            for part in ("key.linear.weight", "value.linear.weight", "value.linear.bias"):
                result[new + part] = state_dict[old + part]
    if shared:
        for part in ("key", "value"):
            rows = [state_dict[f"layers.{layer}.self_attn.{part}.linear.weight"] for layer in layers]
            result[f"{part}.linear.weight"] = torch.stack(rows).mean(dim=0)
    return result
