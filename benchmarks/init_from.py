r"""Beginning a Feedback Transformer as a trained parallel one: does it help?

    python benchmarks/init_from.py            train, or go on, and write results/init-from.json

Three runs on Tiny Shakespeare, with one seed and the same windows: a parallel transformer for so many
updates; a Feedback Transformer that begins from it (`--init-from`) for as many more; and one from scratch for
both numbers together. So the second can be compared with the third after equally many updates of its own, and
after equally many updates in all.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import write_results
from postil.experiments import EXPERIMENTS
from postil.training.curves import read_metrics
from postil.training.run import train
from postil.training.settings import TrainSettings

ROOT = Path(__file__).parents[1]
DEMO = EXPERIMENTS["demo"]


def settings(name: str, mixer: str, updates: int, folder: Path) -> TrainSettings:
    """Give the settings of one run: the demo's at half its width and length, so that it takes a minute.

    The compiled form of the Feedback Transformer knows one activation, so it is taken for both models.
    """
    return replace(
        DEMO,
        experiment=None,
        mixer=mixer,
        text="tiny-shakespeare",
        out=str(folder / name),
        max_time=None,
        updates=updates,
        model=replace(DEMO.model, d_model=64, seq_len=64, activation="relu"),
        evaluate_every=updates,
        evaluate_windows=0,
        sample_every=0,
        threads=1,
        seed=1,
    )


def bits(folder: Path, name: str, update: int) -> float:
    """Read the bits per character of a run's whole validation text after an update."""
    lines = read_metrics(folder / name / "metrics.jsonl")
    return next(x["bits"] for x in lines if x["kind"] == "valid" and x["update"] == update)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--updates", type=int, default=200, help="of the parallel run, and of what follows it"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/benchmark-init-from")
    chosen = parser.parse_args()
    n, folder = chosen.updates, chosen.folder
    parallel = settings("parallel", "multi-head-attention", n, folder)
    begun = replace(settings("begun", "feedback", n, folder), init_from=str(folder / "parallel"))
    # Evaluated every n updates, so that it is also known after as many as the other had of its own.
    scratch = replace(settings("scratch", "feedback", 2 * n, folder), evaluate_every=n)
    for each in (parallel, begun, scratch):
        if train(each, resume="auto").bits is None:
            print("stopped; the same command goes on from here")
            return 130
    m = parallel.model
    sizes = {
        "T": m.seq_len,
        "B": parallel.optimizer.batch_size,
        "D": m.d_model,
        "L": m.n_layers,
        "H": m.heads,
    }
    found: list[dict[str, Any]] = [
        {
            "name": name,
            "updates_before": before,
            "updates": updates,
            "bits_per_character": bits(folder, run, updates),
        }
        for name, run, before, updates in (
            ("parallel transformer", "parallel", 0, n),
            ("feedback, from that run", "begun", n, n),
            ("feedback, from scratch", "scratch", 0, n),
            ("feedback, from scratch", "scratch", 0, 2 * n),
        )
    ]
    for row in found:
        row |= {"what": "whole validation text of tiny-shakespeare", "sizes": sizes, "threads": 1}
        row["bits_per_character"] = round(row["bits_per_character"], 4)
        print(
            f"{row['name']}: {row['bits_per_character']:.3f} after {row['updates_before']} + {row['updates']}"
        )
    print(write_results("init-from", found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
