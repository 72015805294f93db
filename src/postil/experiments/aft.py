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

![Bits per character of a part of the validation text, over updates of 2,048 characters: small models that
differ in their mixers alone, trained alike.](/benchmarks/results/aft-training.json)

## Try it

The position biases begin at zero. After some hundred updates the picture of them shows what the model found
worth knowing about distance: the last characters stand out, and beyond the window there is nothing to learn.

```python notebook parameters
text, variant, updates, width = "tiny-shakespeare", "aft-local", 400, 128
```

```python notebook
from postil.training.run import train

chosen = VARIANTS[variant]
small = replace(
    chosen,
    text=text,
    epochs=None,
    updates=updates,
    out=f"runs/{variant}",
    model=replace(chosen.model, d_model=width, d_ff=2 * width, n_layers=2, heads=4, seq_len=64),
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
display(Image(f"{small.out}/loss.png"), *(Image(p) for p in sorted(Path(small.out).glob("pictures/*.png"))))
```

:requires: postil[plot]
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
