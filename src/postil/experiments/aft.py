r"""The Attention Free Transformer on Tiny Shakespeare.

Six layers of width 128 with AFT-local in the place of attention, a window of 32 in texts of 256 characters.
What the page of the model promises can be watched here: the cost of a position does not depend on the length
of the text, and a sample of any length is written with a state of fixed size.

    postil train --experiment aft --out runs/aft
    postil sample runs/aft --prompt "It is " --tokens 500

The other members of the family run on the same settings: `aft-full`, `aft-simple`, `aft-conv`. They differ in
what a position knows of distance: a bias for every pair, none at all, one for each lag within a kernel.
Positions are also added to the embeddings, as in the experiment this one follows; without them AFT-simple
would see a bag of earlier characters and no order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from postil.registry import ModelSettings
from postil.training.settings import OptimizerSettings, TrainSettings

__all__ = ["VARIANTS"]

MODEL = ModelSettings(d_model=128, n_layers=6, heads=8, d_ff=256, positions="fixed", seq_len=256)


# An update predicts 32 windows, an epoch has 123 of them. The schedule and the clip are those of the plain
# transformer's experiment.
def _settings(name: str, mixer: str, options: dict[str, Any]) -> TrainSettings:
    return TrainSettings(
        experiment=name,
        mixer=mixer,
        text="tiny-shakespeare",
        epochs=128,
        model=replace(MODEL, options=options),
        optimizer=OptimizerSettings(
            lr=1.0, schedule="noam", warmup=2000, weight_decay=0.0, batch_size=32, clip=1.0
        ),
        evaluate_every=12,
        prompt="It is ",
        sample_tokens=25,
    )


VARIANTS = {
    "aft": _settings("aft", "aft-local", {"local_window_size": 32}),
    "aft-local": _settings("aft-local", "aft-local", {"local_window_size": 32}),
    "aft-full": _settings("aft-full", "aft-full", {}),
    "aft-simple": _settings("aft-simple", "aft-simple", {}),
    "aft-conv": _settings("aft-conv", "aft-conv", {"kernel_size": 32}),
}
