r"""The demo: from nothing to text that looks like Shakespeare in about two minutes on a laptop.

A small transformer, short windows, and an end by the clock instead of by updates, so that it takes the same
time on any machine. The constant rate after a short warm-up is what a run whose end is not known can use.

    make demo

## Try it

Any text will do: put the path of a file of yours in the place of the name, and a prompt it might begin with.

```python notebook parameters
text, prompt, seconds = "tiny-shakespeare", "It is ", 120
```

```python notebook
from dataclasses import replace

from postil.training.run import train

mine = replace(SETTINGS, text=text, prompt=prompt, max_time=seconds, out="runs/demo")
train(mine, overwrite=True)
```

```python notebook
from IPython.display import Image

from postil.cli import main

main(["info", mine.out])
main(["sample", mine.out, "--prompt", prompt, "--tokens", "300"])
Image(f"{mine.out}/loss.png")
```

:requires: postil[plot]
"""

from __future__ import annotations

from postil.registry import ModelSettings
from postil.training.settings import OptimizerSettings, TrainSettings

__all__ = ["SETTINGS"]

SETTINGS = TrainSettings(
    experiment="demo",
    mixer="multi-head-attention",
    max_time=120,
    model=ModelSettings(d_model=128, n_layers=3, heads=4, seq_len=128, dropout=0.0, activation="gelu"),
    optimizer=OptimizerSettings(lr=2e-3, schedule="constant", warmup=50, batch_size=32),
    evaluate_every=100,
    prompt="It is ",
    sample_tokens=60,
)
