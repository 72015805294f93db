r"""The algorithmic task: a Feedback Transformer and a parallel one on the same curriculum.

    python benchmarks/algorithmic.py                    train both, or go on from where they are, and report
    python benchmarks/algorithmic.py --report           only report on what there is
    python benchmarks/algorithmic.py --only feedback    one of the two, to train them at the same time

Both models are the experiment's (`experiments/algorithmic`), alike in layers, width and embeddings, and read
the same programs in the same order, stage by stage: one variable, two, three, and then programs as long as
those of the paper. A stage begins from the weights that the one before it left, like `postil train
--init-from`. Given three variables at once, neither model came further in some minutes than a model that
overlooks every condition. After each stage, and some times in it, both answer the same 1,000 programs that
neither has read. Everything is kept in the folders of the runs: stopped and started again, it goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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
PUBLISHED = {
    "feedback": {"layers": 4, "accuracy": {3: 0.991, 5: 0.926}},
    "multi-head-attention": {"layers": 8, "accuracy": {3: 0.337, 5: 0.375}},
}
"""Layers, and accuracy by the number of variables, with 100 statements; [fan2020], Table 1."""

LABELS = {"feedback": "Feedback Transformer", "multi-head-attention": "parallel transformer"}


class Stage(NamedTuple):
    """What is read for how long; sequences grow from `begin` tokens to `seq_len` over `growing` updates."""

    variables: int
    statements: int
    seq_len: int
    updates: int
    begin: int
    growing: int
    lr: float


CURRICULUM = (
    Stage(1, 18, 96, 2100, 16, 900, 2e-3),
    Stage(2, 18, 96, 2100, 24, 300, 1.5e-3),
    Stage(3, 18, 96, 2100, 24, 300, 1e-3),
    Stage(3, 40, 192, 500, 96, 50, 1e-3),
    Stage(3, 100, 512, 800, 192, 100, 1e-3),
    Stage(5, 100, 512, 800, 192, 100, 1e-3),
)


def folder_of(folder: Path, mixer: str, index: int) -> Path:
    """Say where a stage of a model is kept."""
    stage = CURRICULUM[index]
    return folder / mixer / f"{index + 1}-{stage.variables}-variables-{stage.statements}"


def settings(folder: Path, mixer: str, index: int) -> TrainSettings:
    """Give the settings of one stage of one model; the programs of each stage are new."""
    now = CURRICULUM[index]
    return replace(
        EXPERIMENT,
        mixer=mixer,
        out=str(folder_of(folder, mixer, index)),
        init_from=str(folder_of(folder, mixer, index - 1)) if index else None,
        seed=index + 1,
        updates=now.updates,
        seq_len_from=now.begin,
        seq_len_over=now.growing,
        model=replace(EXPERIMENT.model, seq_len=now.seq_len),
        data=replace(EXPERIMENT.data, statements=now.statements, variables=now.variables),
        optimizer=replace(EXPERIMENT.optimizer, schedule="cosine", lr=now.lr, warmup=50),
        threads=1,
        log_every=50,
        sample_every=0,
        evaluate_every=now.updates // 4,
        evaluate_windows=1000,
    )


def train_to_its_end(plan: TrainSettings) -> bool:
    """Go on with a stage until it is over; return whether it is."""
    run = Path(str(plan.out))
    if any(line["update"] == plan.updates for line in finals(run)):
        return True
    began = time.process_time()
    outcome = train(plan, resume="auto")
    add_cpu_seconds(run, time.process_time() - began)
    return outcome.bits is not None


def finals(run: Path) -> list[dict[str, Any]]:
    """Give the evaluation at the end of a stage, if it is over."""
    return [line for line in lines(run) if line["kind"] == "final"]


def lines(run: Path) -> list[dict[str, Any]]:
    """Give what a run has noted so far."""
    path = run / "metrics.jsonl"
    return list(read_metrics(path)) if path.exists() else []


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
def rows(folder: Path) -> list[dict[str, Any]]:
    """Give one row a stage and model; programs, tokens and time count from the first stage on."""
    found, so_far = [], {mixer: Counter() for mixer in MODELS}
    for index, now in enumerate(CURRICULUM):
        runs = {mixer: folder_of(folder, mixer, index) for mixer in MODELS}
        if not all(finals(run) for run in runs.values()):
            break
        programs = [make_program(-n, now.statements, now.variables) for n in range(1, 1001)]
        for mixer, run in runs.items():
            record = json.loads((run / "run.json").read_text())
            last, size = finals(run)[-1], record["settings"]["optimizer"]["batch_size"]
            total, read = so_far[mixer], so_far[mixer]["update"]
            total.update(update=last["update"], tokens=last["tokens"], seconds=cpu_seconds(run))
            published = PUBLISHED[mixer]
            found.append(
                {
                    "name": mixer,
                    "what": f"accuracy of printed values, {LABELS[mixer]}",
                    "statements": now.statements,
                    "variables": now.variables,
                    "accuracy": round(last["accuracy"], 4),
                    "bits_per_printed_value": round(last["bits"], 4),
                    "always_the_commonest_value": round(commonest(programs), 4),
                    "changes_overlooked": round(first_values(programs), 4),
                    "conditions_overlooked": round(without_conditions(programs), 4),
                    "published": {
                        "accuracy": published["accuracy"].get(now.variables),
                        "layers": published["layers"],
                        "statements": 100,
                    },
                    "sizes": sizes(record),
                    "programs": total["update"] * size,
                    "tokens": total["tokens"],
                    "cpu_seconds": round(total["seconds"], 1),
                    "threads": 1,
                    "curve": [
                        [(read + line["update"]) * size, round(line["accuracy"], 4)]
                        for line in lines(run)
                        if line["kind"] in ("valid", "final")
                    ],
                }
            )
    return found


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
    """Draw accuracy over programs read, one chart a stage, with what others get beside it."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    stages = sorted({(row["statements"], row["variables"]) for row in found})
    figure = Figure(figsize=(10, 6), layout="constrained")
    charts = figure.subplots(2, 3, sharey=True).flat
    for axes, each in zip(charts, stages, strict=False):
        _chart(axes, [row for row in found if (row["statements"], row["variables"]) == each])
    figure.supylabel("printed values that are right, %", fontsize=9)
    figure.supxlabel("thousands of programs read, from the first stage on", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The ids in an SVG are drawn at random unless salted: the same data gives the same file.
    with rc_context({"svg.hashsalt": "postil", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


COLOURS = dict(zip(MODELS, ("#0550ae", "#9a6700"), strict=True))


def _chart(axes: Any, found: list[dict[str, Any]]) -> None:
    for row in found:
        x, y = zip(*row["curve"], strict=True)
        label = f"{LABELS[row['name']]}: {100 * row['accuracy']:.1f} %"
        thousands = [value / 1000 for value in x]
        axes.plot(
            thousands, [100 * value for value in y], color=COLOURS[row["name"]], marker="o", ms=3, label=label
        )
        theirs = row["published"]
        if row["statements"] == theirs["statements"]:
            text = f"published, {theirs['layers']} layers: {100 * theirs['accuracy']:.1f} %"
            _line(axes, theirs["accuracy"], text, COLOURS[row["name"]])
    _line(axes, found[0]["conditions_overlooked"], "conditions overlooked", "#57606a")
    statements, variables = found[0]["statements"], found[0]["variables"]
    axes.set_title(f"{variables} variable{'s' if variables > 1 else ''}, {statements} statements", fontsize=9)
    axes.set(ylim=(0, 106))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower center", fontsize=7)


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
    parser.add_argument("--only", choices=MODELS, action="append", help="models to train; default: both")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/benchmark-algorithmic")
    parser.add_argument("--report", action="store_true", help="train nothing")
    chosen = parser.parse_args()
    for index in [] if chosen.report else range(len(CURRICULUM)):
        for mixer in chosen.only or MODELS:
            if not train_to_its_end(settings(chosen.folder, mixer, index)):
                print("stopped; the same command goes on from here")
                return 130
    if chosen.only:
        return 0
    found = rows(chosen.folder)
    for row in found:
        print(
            f"{row['variables']} variables, {row['statements']} statements, {row['name']}: "
            f"{100 * row['accuracy']:.1f} % right after {row['programs']:,} programs"
        )
    # However it was trained, in one go or several: the command without options makes these results.
    sys.argv = sys.argv[:1]
    print(write_results("algorithmic", found))
    draw(found, PICTURE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
