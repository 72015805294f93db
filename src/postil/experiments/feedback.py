r"""The Feedback Transformer on Tiny Shakespeare.

Six layers of width 512 and 8 heads on texts of 128 characters. The embeddings carry no positions, since the
attention of this model tells distances apart by itself, and there is no dropout.

    postil train --experiment feedback --out runs/feedback
    postil train --experiment feedback-original --out runs/feedback-original

`feedback` shares keys and values between layers, `feedback-original` projects them anew in each. Both read
what the highest layer wrote at earlier positions, which no parallel transformer can, and pay for it by
computing the positions of a text one after the other. A width of 512 is much for a laptop: `--model.d_model
128 --model.d_ff 512` shows the same in a tenth of the time.
"""

from __future__ import annotations

from postil.registry import ModelSettings
from postil.training.settings import OptimizerSettings, TrainSettings

__all__ = ["VARIANTS"]

MODEL = ModelSettings(d_model=512, n_layers=6, heads=8, d_ff=2048, positions="none", seq_len=128, dropout=0.0)


def _settings(name: str) -> TrainSettings:
    return TrainSettings(
        experiment=name,
        mixer=name,
        text="tiny-shakespeare",
        epochs=128,
        model=MODEL,
        optimizer=OptimizerSettings(
            lr=1.0, schedule="noam", warmup=2000, weight_decay=0.0, batch_size=64, clip=1.0
        ),
        # The experiment alternates between training and validation 25 times an epoch of 123 updates.
        evaluate_every=5,
        prompt="It is",
        sample_tokens=25,
    )


VARIANTS = {name: _settings(name) for name in ("feedback", "feedback-original")}
