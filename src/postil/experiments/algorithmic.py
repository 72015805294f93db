r"""The algorithmic task: programs to be followed in the head.

A program gives a few variables their values, and then changes, compares and prints them; the model must say
what each `print` prints (`text/algorithmic` says how they are made). All that makes text easy to continue is
taken away. What remains is state: a value that changes from statement to statement and is never shown again.

    postil train --experiment algorithmic --out runs/algorithmic
    postil train --experiment algorithmic --mixer multi-head-attention --out runs/parallel
    postil sample runs/algorithmic --prompt "x = 4 ; y = 7 ; x ++ ; if x < y : y -- ; print y"

![Share of printed values that were right, over programs read.](/benchmarks/results/algorithmic.json)
"""

from __future__ import annotations

from postil.registry import ModelSettings
from postil.training.settings import DataSettings, OptimizerSettings, TrainSettings

__all__ = ["SETTINGS"]

SETTINGS = TrainSettings(
    experiment="algorithmic",
    mixer="feedback",
    text="algorithmic",
    updates=3000,
    seq_len_from=24,
    seq_len_over=1600,
    model=ModelSettings(d_model=64, n_layers=3, heads=4, positions="fixed", seq_len=96, dropout=0.0),
    data=DataSettings(statements=18, variables=3),
    optimizer=OptimizerSettings(
        lr=2e-3, schedule="constant", warmup=100, weight_decay=0.0, batch_size=32, clip=1.0
    ),
    evaluate_every=200,
    evaluate_windows=128,
    prompt="x = 4 ; y = 7 ; z = 2 ; x ++ ; if x < y : y -- ; z ++ ; print y",
    sample_tokens=1,
)
