r"""The Feedback Transformer on Tiny Shakespeare.

Six layers of width 512 and 8 heads on texts of 128 characters. The embeddings carry no positions, since the
attention of this model tells distances apart by itself, and there is no dropout.

    postil train --experiment feedback --out runs/feedback
    postil train --experiment feedback-original --out runs/feedback-original

`feedback` shares keys and values between layers, `feedback-original` projects them anew in each. Both read
what the highest layer wrote at earlier positions, which no parallel transformer can, and pay for it by
computing the positions of a text one after the other. A width of 512 is much for a laptop: `--model.d_model
128 --model.d_ff 512` shows the same in a tenth of the time.

## Try it

The first picture says what a memory is made of: it begins as an equal share of all layers, and training moves
it. The others show which memories each head reads. Before the first update the compiled kernel is built,
once.

```python notebook parameters
text, variant, updates, width = "tiny-shakespeare", "feedback", 300, 128
```

```python notebook
from dataclasses import replace

from postil.training.run import train

chosen = VARIANTS[variant]
small = replace(
    chosen,
    text=text,
    epochs=None,
    updates=updates,
    out=f"runs/{variant}",
    model=replace(chosen.model, d_model=width, d_ff=4 * width, n_layers=2, heads=4, seq_len=64),
    optimizer=replace(chosen.optimizer, batch_size=16, warmup=1 + updates // 2),
)
train(small, overwrite=True)
```

```python notebook
from pathlib import Path

from IPython.display import Image, display

from postil.cli import main

main(["sample", small.out, "--tokens", "200"])
main(["show", small.out, "--prompt", "It is the east, and Juliet is the sun."])
pictures = sorted(Path(small.out).glob("pictures/*.png"), reverse=True)
display(Image(f"{small.out}/loss.png"), *(Image(path) for path in pictures))
```

:requires: postil[plot]
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
