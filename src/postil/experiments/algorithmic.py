r"""The algorithmic task: programs to be followed in the head.

A program gives a few variables their values, and then changes, compares and prints them; the model must say
what each `print` prints (`text/algorithmic` says how they are made). All that makes text easy to continue is
taken away. What remains is state: a value that changes from statement to statement and is never shown again.

    postil train --experiment algorithmic --out runs/algorithmic
    postil train --experiment algorithmic --mixer multi-head-attention --out runs/parallel
    postil sample runs/algorithmic --prompt "x = 4 ; x ++ ; if x < 6 : x ++ ; print x"

[fan2020] train on programs of 100 statements and report that this share of the printed values is right:

| | layers | 3 variables | 5 variables |
| --- | --- | --- | --- |
| parallel transformer | 8 | 33.7 % | 37.5 % |
| Feedback Transformer | 4 | 99.1 % | 92.6 % |

Theirs is a training for GPUs: width 256, 50,000 updates of 512 programs, a learning rate of 0.0001. Here
everything is smaller, so that minutes on one processor core show the difference: three layers of width 64
for both models, 32 programs in an update, and one variable. One is enough to need state, for whether
`if x < 5 : x ++` changes anything depends on all that came before.

Given three variables at once, neither model comes further in such a time than overlooking every condition
would. Too much is unknown together: what a comparison does, and with whose value. A model that has learnt the
one has only the other left to learn. So variables come one by one, and only then the programs become long:

    postil train --experiment algorithmic --data.variables 2 --optimizer.lr 1e-3 \
        --init-from runs/algorithmic --out runs/two
    postil train --experiment algorithmic --data.variables 3 --optimizer.lr 1e-3 \
        --init-from runs/two --out runs/three
    postil train --experiment algorithmic --data.variables 3 --optimizer.lr 1e-3 \
        --data.statements 100 --model.seq_len 512 --init-from runs/three --out runs/long

`benchmarks/algorithmic.py` takes both models through this curriculum, up to programs of the length in the
table and on to five variables:

![Printed values that are right, over programs read. Each line is a stage: one, two and three variables, 40
and 100 statements, five variables.](/benchmarks/results/algorithmic.json)

## Try it

Change the program and see which statements the model has followed. It knows no variable but `x`, which must
be assigned at the beginning.

```python notebook parameters
mixer, updates = "feedback", 2100
program = "x = 4 ; x ++ ; if x < 6 : x ++ ; if x > 8 : x -- ; print x"
```

```python notebook
from dataclasses import replace

from postil.training.run import train

small = replace(SETTINGS, mixer=mixer, updates=updates, out=f"runs/algorithmic-{mixer}")
train(small, overwrite=True)
```

```python notebook
from IPython.display import Image

from postil.cli import main

main(["info", small.out])
main(["sample", small.out, "--prompt", program, "--temperature", "0"])
Image(f"{small.out}/loss.png")
```

:requires: postil[plot]
"""

from __future__ import annotations

from postil.registry import ModelSettings
from postil.training.settings import DataSettings, OptimizerSettings, TrainSettings

__all__ = ["SETTINGS"]

# A model that is given long programs at once learns to guess from the first values, and stays at that for a
# long time. With one or two statements to follow it finds out what they do, in a few hundred cheap updates,
# and needs only to go on when there are more. So the sequences grow.
SETTINGS = TrainSettings(
    experiment="algorithmic",
    mixer="feedback",
    text="algorithmic",
    updates=2100,
    seq_len_from=16,
    seq_len_over=900,
    model=ModelSettings(d_model=64, n_layers=3, heads=4, positions="fixed", seq_len=96, dropout=0.0),
    data=DataSettings(statements=18, variables=1),
    optimizer=OptimizerSettings(
        lr=2e-3, schedule="constant", warmup=100, weight_decay=0.0, batch_size=32, clip=1.0
    ),
    evaluate_every=200,
    evaluate_windows=128,
    prompt="x = 4 ; x ++ ; if x < 6 : x ++ ; if x > 8 : x -- ; print x",
    sample_tokens=1,
)
