r"""The algorithmic task: a Feedback Transformer and a parallel one on the same programs.

    python benchmarks/algorithmic.py                    train both, or go on from where they are, and report
    python benchmarks/algorithmic.py --report           only report on what there is

Both models are the experiment's (`experiments/algorithmic`), alike in layers, width and embeddings, and read
the same programs in the same order. They are trained in turns, so that at any time both have read as much;
after each turn both answer the same 1,000 programs that neither has read. The learning rate is constant until
then, so that a turn may be the last at any time. What it leaves unsettled is settled in a last stretch, in
which the rate falls along a cosine; it begins from the weights of the run, like `postil train --init-from`.
Everything is kept in the folders of the runs: stopped and started again, it goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import write_results
from postil.experiments import EXPERIMENTS
from postil.text.algorithmic import NUMBERS, Program, make_program
from postil.training.curves import read_metrics
from postil.training.run import train
from postil.training.settings import TrainSettings

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/pictures/algorithmic.svg"
EXPERIMENT = EXPERIMENTS["algorithmic"]
MODELS = ("feedback", "multi-head-attention")
PUBLISHED = {"feedback": (4, 99.1), "multi-head-attention": (8, 33.7)}
"""Layers, and accuracy in percent with 3 variables and 100 statements, in [fan2020], Table 1."""

LABELS = {"feedback": "Feedback Transformer", "multi-head-attention": "parallel transformer"}


def settings(mixer: str, folder: Path) -> TrainSettings:
    """Give the settings of one of the runs."""
    return replace(
        EXPERIMENT,
        mixer=mixer,
        out=str(folder / mixer),
        threads=1,
        log_every=50,
        sample_every=0,
        # A turn ends with an evaluation of its own.
        evaluate_every=10 * EXPERIMENT.updates,
    )


def last_stretch(mixer: str, folder: Path, updates: int) -> TrainSettings:
    """Give the settings of what follows: programs of full length that the run has not read."""
    first = settings(mixer, folder)
    return replace(
        first,
        out=str(folder / f"{mixer}-last"),
        init_from=str(folder / mixer),
        updates=updates,
        seed=first.seed + 1,
        seq_len_from=None,
        seq_len_over=None,
        optimizer=replace(first.optimizer, schedule="cosine", lr=first.optimizer.lr / 2, warmup=20),
    )


# ## In turns
def train_in_turns(folder: Path, updates: int, turn: int, last: int) -> bool:
    """Train both models up to `updates` and `last` more; return whether they came so far."""
    plans = [
        replace(settings(mixer, folder), updates=goal)
        for goal in [*range(turn, updates, turn), updates]
        for mixer in MODELS
    ]
    return all(map(train_to_its_end, [*plans, *(last_stretch(mixer, folder, last) for mixer in MODELS)]))


def train_to_its_end(plan: TrainSettings) -> bool:
    """Go on with a run until it has made its updates; return whether it has."""
    run = Path(str(plan.out))
    if reached(run, plan.updates):
        return True
    began = time.process_time()
    outcome = train(plan, resume="auto")
    add_cpu_seconds(run, time.process_time() - began)
    return outcome.bits is not None


def finals(run: Path) -> list[dict[str, Any]]:
    """Give the evaluations on all 1,000 programs, one after each turn."""
    path = run / "metrics.jsonl"
    return [line for line in read_metrics(path) if line["kind"] == "final"] if path.exists() else []


def reached(run: Path, goal: int | None) -> bool:
    """Say whether a turn is over."""
    return any(line["update"] == goal for line in finals(run))


def cpu_seconds(run: Path) -> float:
    """Give the processor time of a run so far, evaluations included."""
    path = run / "cpu-seconds.json"
    return json.loads(path.read_text()) if path.exists() else 0.0


def add_cpu_seconds(run: Path, seconds: float) -> None:
    """Add the processor time of a sitting."""
    (run / "cpu-seconds.json").write_text(json.dumps(round(cpu_seconds(run) + seconds, 1)))


# ## What can be had without following a program
def commonest(programs: list[Program]) -> float:
    """Share of answers that are right if always the most frequent value is given."""
    counts = Counter(answer for program in programs for answer in program.answers if answer is not None)
    return max(counts.values()) / sum(counts.values())


def first_values(programs: list[Program]) -> float:
    """Share of answers that are right if every change of a variable is overlooked."""
    right = asked = 0
    for tokens, answers in programs:
        values = {
            tokens[i - 1]: int(tokens[i + 1])
            for i, token in enumerate(tokens)
            if token == "=" and tokens[i + 1] in NUMBERS
        }
        for place, answer in enumerate(answers):
            if answer is not None:
                asked += 1
                right += values[tokens[place]] == answer
    return right / asked


# ## Report
def rows(folder: Path) -> list[dict[str, Any]]:
    """Give one row a model."""
    curves = {mixer: curve(folder, mixer) for mixer in MODELS}
    shared = sorted(set.intersection(*(set(each) for each in curves.values())))
    data, size = EXPERIMENT.data, EXPERIMENT.optimizer.batch_size
    programs = [make_program(-n, data.statements, data.variables) for n in range(1, 1001)]
    found = []
    for mixer in MODELS:
        record = json.loads((folder / mixer / "run.json").read_text())
        last = curves[mixer][shared[-1]]
        layers, published = PUBLISHED[mixer]
        found.append(
            {
                "name": mixer,
                "what": f"accuracy of printed values, {LABELS[mixer]}",
                "statements": data.statements,
                "variables": data.variables,
                "accuracy": round(last["accuracy"], 4),
                "bits_per_printed_value": round(last["bits"], 4),
                "always_the_commonest_value": round(commonest(programs), 4),
                "changes_overlooked": round(first_values(programs), 4),
                "published": {"accuracy": published / 100, "layers": layers, "statements": 100},
                "sizes": sizes(record),
                "updates": last["update"],
                "programs": last["update"] * size,
                "tokens": last["tokens"],
                "cpu_seconds": sum(cpu_seconds(folder / name) for name in (mixer, f"{mixer}-last")),
                "threads": 1,
                "curve": [[update * size, round(curves[mixer][update]["accuracy"], 4)] for update in shared],
            }
        )
    return found


# The last stretch starts to count where the run has ended.
def curve(folder: Path, mixer: str) -> dict[int, dict[str, Any]]:
    """Give the evaluations of a model by the updates it had made."""
    first = finals(folder / mixer)
    end = first[-1]
    last = [
        {**line, "update": end["update"] + line["update"], "tokens": end["tokens"] + line["tokens"]}
        for line in finals(folder / f"{mixer}-last")
    ]
    return {line["update"]: line for line in [*first, *last]}


def sizes(record: dict[str, Any]) -> dict[str, Any]:
    """Say how large a model is."""
    m = record["settings"]["model"]
    return {
        "T": m["seq_len"],
        "B": record["settings"]["optimizer"]["batch_size"],
        "D": m["d_model"],
        "L": m["n_layers"],
        "H": m["heads"],
        "d_ff": m["d_ff"],
        "parameters": record["parameters"],
    }


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw accuracy over programs read, with the published figures beside it."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    colours = dict(zip(MODELS, ("#0550ae", "#9a6700"), strict=True))
    for row in found:
        colour, layers = colours[row["name"]], row["sizes"]["L"]
        x, y = zip(*((0, row["always_the_commonest_value"]), *row["curve"]), strict=True)
        axes.plot(
            x[1:],
            [100 * value for value in y[1:]],
            color=colour,
            label=f"{LABELS[row['name']]}, {layers} layers: {100 * row['accuracy']:.1f} %",
        )
        published = row["published"]
        axes.axhline(100 * published["accuracy"], color=colour, linewidth=0.8, linestyle=":")
        axes.annotate(
            f"published, {published['layers']} layers, 100 statements: {100 * published['accuracy']:.1f} %",
            (1, 100 * published["accuracy"]),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            xytext=(-4, 3),
            ha="right",
            fontsize=7,
            color=colour,
        )
    chance = 100 * found[0]["always_the_commonest_value"]
    axes.axhline(chance, color="#8c959f", linewidth=0.8)
    axes.annotate(
        "always the commonest value", (0, chance), textcoords="offset points", xytext=(4, 3), fontsize=7
    )
    statements, variables = found[0]["statements"], found[0]["variables"]
    axes.set(
        xlabel=f"programs read, of {statements} statements over {variables} variables",
        ylabel="printed values that are right, %",
        ylim=(0, 102),
        xlim=(0, None),
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="center right")
    path.parent.mkdir(parents=True, exist_ok=True)
    # The ids in an SVG are drawn at random unless salted: the same data gives the same file.
    with rc_context({"svg.hashsalt": "postil"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=EXPERIMENT.updates, help="of each model, in turns")
    parser.add_argument("--turn", type=int, default=300, help="updates of one before the other's turn")
    parser.add_argument("--last", type=int, default=450, help="updates of the last stretch")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/benchmark-algorithmic")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--quick", action="store_true", help="a few updates, to see that it works")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.folder = chosen.folder.with_name("quick-algorithmic")
        chosen.updates, chosen.turn, chosen.last = 20, 10, 10
    trained = (chosen.folder, chosen.updates, chosen.turn, chosen.last)
    if not chosen.report and not train_in_turns(*trained):
        print("stopped; the same command goes on from here")
        return 130
    found = rows(chosen.folder)
    for row in found:
        print(f"{row['name']}: {100 * row['accuracy']:.1f} % after {row['programs']:,} programs")
    if not chosen.quick:
        print(write_results("algorithmic", found))
        draw(found, PICTURE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
