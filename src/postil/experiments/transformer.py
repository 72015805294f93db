r"""The plain transformer on Tiny Shakespeare.

The experiment that the others are measured against: six pre-norm layers of multi-head attention, width 256
in 16 heads, learned positions, characters as tokens. Each update predicts 16 windows of 512 characters, and
an epoch has 123 of them, so that 32 epochs read the text 32 times.

The learning rate follows the schedule of [vaswani2017] with its constant at 1: with $D = 256$ and 2,000
updates of warm-up it peaks at $256^{-1/2} \cdot 2000^{-1/2} = 0.0014$.

    postil train --experiment transformer --out runs/transformer
    postil sample runs/transformer --prompt "It is " --tokens 500

Every value can be changed by a flag: `--epochs 1 --model.d_model 128` makes a run for a laptop's coffee
break.

## Try it

Some hundred updates teach a small model how long words and lines are; for words and names give it ten times
as many. The pictures show which earlier characters each head reads. Change a setting above, run its cell
again, and compare.

```python notebook parameters
text, updates, width = "tiny-shakespeare", 300, 128
```

```python notebook
from dataclasses import replace

from postil.training.run import train

small = replace(
    SETTINGS,
    text=text,
    epochs=None,
    updates=updates,
    out="runs/transformer",
    model=replace(SETTINGS.model, d_model=width, d_ff=4 * width, n_layers=2, heads=4, seq_len=64),
    optimizer=replace(SETTINGS.optimizer, batch_size=16, warmup=1 + updates // 2),
)
train(small, overwrite=True)
```

```python notebook
from IPython.display import Image, display

from postil.cli import main

main(["sample", small.out, "--tokens", "200"])
main(["show", small.out, "--prompt", "It is the east, and Juliet is the sun."])
display(Image(f"{small.out}/loss.png"), Image(f"{small.out}/pictures/attention.png"))
```

:requires: postil[plot]
"""

from __future__ import annotations

from postil.registry import ModelSettings
from postil.training.settings import DataSettings, OptimizerSettings, TrainSettings

__all__ = ["SETTINGS"]

SETTINGS = TrainSettings(
    experiment="transformer",
    mixer="multi-head-attention",
    text="tiny-shakespeare",
    epochs=32,
    model=ModelSettings(d_model=256, n_layers=6, heads=16, d_ff=1024, positions="learned", seq_len=512),
    data=DataSettings(tokenizer="characters", valid_fraction=0.1),
    # The paper's Adam has $\beta_2 = 0.98$ and no decay; the clip at 1 is the experiment's own.
    optimizer=OptimizerSettings(
        lr=1.0, schedule="noam", warmup=2000, weight_decay=0.0, batch_size=16, clip=1.0
    ),
    evaluate_every=12,
    prompt="It is ",
    sample_tokens=25,
)
