r"""The algorithmic task: a Feedback Transformer and a parallel one on the same programs.

    python benchmarks/algorithmic.py                    train both, or go on from where they are, and report
    python benchmarks/algorithmic.py --report           only report on what there is
    python benchmarks/algorithmic.py --only feedback    one of the two, to train them at the same time

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
import sys
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
TASKS = {
    1: EXPERIMENT,
    3: replace(
        EXPERIMENT,
        seq_len_from=24,
        seq_len_over=1600,
        model=replace(EXPERIMENT.model, seq_len=96),
        data=replace(EXPERIMENT.data, statements=18, variables=3),
    ),
}
"""Settings by the number of variables. One variable is the smallest task that needs state at all."""

MODELS = ("feedback", "multi-head-attention")
PUBLISHED = {"feedback": (4, 99.1), "multi-head-attention": (8, 33.7)}
"""Layers, and accuracy in percent with 3 variables and 100 statements, in [fan2020], Table 1."""

LABELS = {"feedback": "Feedback Transformer", "multi-head-attention": "parallel transformer"}


def settings(mixer: str, folder: Path, variables: int) -> TrainSettings:
    """Give the settings of one of the runs."""
    return replace(
        TASKS[variables],
        mixer=mixer,
        out=str(folder / mixer),
        threads=1,
        log_every=50,
        sample_every=0,
        # A turn ends with an evaluation of its own.
        evaluate_every=10**6,
    )


def last_stretch(first: TrainSettings, updates: int) -> TrainSettings:
    """Give the settings of what follows a run: programs of full length that it has not read."""
    return replace(
        first,
        out=f"{first.out}-last",
        init_from=first.out,
        updates=updates,
        seed=first.seed + 1,
        seq_len_from=None,
        seq_len_over=None,
        optimizer=replace(first.optimizer, schedule="cosine", lr=first.optimizer.lr / 2, warmup=20),
    )


# ## In turns
def train_in_turns(runs: list[TrainSettings], updates: int, turn: int, last: int) -> bool:
    """Train all models up to `updates` and `last` more; return whether they came so far."""
    goals = [*range(turn, updates, turn), updates]
    plans = [replace(each, updates=goal) for goal in goals for each in runs]
    return all(map(train_to_its_end, [*plans, *(last_stretch(each, last) for each in runs)]))


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


def without_conditions(programs: list[Program]) -> float:
    """Share of answers that are right if every change is followed that stands under no condition.

    Sums of changes do not depend on their order, so attention can take them without keeping state.
    """
    right = asked = 0
    for tokens, answers in programs:
        said = [answer for answer in answers if answer is not None]
        words = [tuple(part.split()) for part in " ".join(tokens).removesuffix("END").split(";")]
        values: dict[str, int] = {}
        found = []
        for statement in words:
            match statement:
                case (name, "=", number):
                    values[name] = int(number)
                case (name, "++" | "--" as change):
                    values[name] += 1 if change == "++" else -1
                case ("print", name):
                    found.append(values[name])
        asked += len(said)
        right += sum(a == b for a, b in zip(said, found, strict=True))
    return right / asked


# ## Report
def rows(folder: Path, variables: int) -> list[dict[str, Any]]:
    """Give one row a model."""
    curves = {mixer: curve(folder, mixer) for mixer in MODELS}
    shared = sorted(set.intersection(*(set(each) for each in curves.values())))
    data, size = TASKS[variables].data, TASKS[variables].optimizer.batch_size
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
                "conditions_overlooked": round(without_conditions(programs), 4),
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
        "d_ff": m["d_ff"] or 4 * m["d_model"],
        "parameters": record["parameters"],
    }


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw accuracy over programs read, one chart a task, with what others get beside it."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    tasks = sorted({row["variables"] for row in found})
    figure = Figure(figsize=(1 + 4.5 * len(tasks), 4.2), layout="constrained")
    for axes, variables in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        _chart(axes, [row for row in found if row["variables"] == variables])
    path.parent.mkdir(parents=True, exist_ok=True)
    # The ids in an SVG are drawn at random unless salted: the same data gives the same file.
    with rc_context({"svg.hashsalt": "postil", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


COLOURS = dict(zip(MODELS, ("#0550ae", "#9a6700"), strict=True))


def _chart(axes: Any, found: list[dict[str, Any]]) -> None:
    for row in found:
        x, y = zip(*row["curve"], strict=True)
        label = f"{LABELS[row['name']]}, {row['sizes']['L']} layers: {100 * row['accuracy']:.1f} %"
        axes.plot(x, [100 * value for value in y], color=COLOURS[row["name"]], marker="o", ms=3, label=label)
        if row["variables"] == 3:
            theirs = row["published"]
            text = f"published: {theirs['layers']} layers, 100 statements, {100 * theirs['accuracy']:.1f} %"
            _line(axes, theirs["accuracy"], text, COLOURS[row["name"]])
    _line(axes, found[0]["conditions_overlooked"], "all conditions overlooked", "#57606a")
    statements, variables = found[0]["statements"], found[0]["variables"]
    axes.set(
        xlabel=f"programs read: {statements} statements, {variables} variable{'s' if variables > 1 else ''}",
        ylabel="printed values that are right, %",
        ylim=(0, 106),
        xlim=(0, None),
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right", fontsize=8)


def _line(axes: Any, height: float, text: str, colour: str) -> None:
    axes.axhline(100 * height, color=colour, linewidth=0.8, linestyle=":")
    axes.annotate(
        text,
        (0, 100 * height),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        xytext=(4, 2),
        fontsize=7,
        color=colour,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variables", type=int, choices=TASKS, action="append", help="tasks; default: all")
    parser.add_argument("--only", choices=MODELS, action="append", help="models to train; default: both")
    parser.add_argument("--turn", type=int, default=300, help="updates of one before the other's turn")
    parser.add_argument("--last", type=int, default=450, help="updates of the last stretch")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/benchmark-algorithmic")
    parser.add_argument("--report", action="store_true", help="train nothing")
    chosen = parser.parse_args()
    for variables in [] if chosen.report else chosen.variables or TASKS:
        folder = chosen.folder / f"variables-{variables}"
        runs = [settings(mixer, folder, variables) for mixer in chosen.only or MODELS]
        if not train_in_turns(runs, TASKS[variables].updates or 0, chosen.turn, chosen.last):
            print("stopped; the same command goes on from here")
            return 130
    if chosen.only:
        return 0
    there = [
        n for n in TASKS if all((chosen.folder / f"variables-{n}" / f"{m}-last").exists() for m in MODELS)
    ]
    found = [row for n in there for row in rows(chosen.folder / f"variables-{n}", n)]
    for row in found:
        print(
            f"{row['variables']} variables, {row['name']}: {100 * row['accuracy']:.1f} % right after "
            f"{row['programs']:,} programs"
        )
    # However it was trained, in one go or several: the command without options makes these results.
    sys.argv = sys.argv[:1]
    print(write_results("algorithmic", found))
    draw(found, PICTURE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
