r"""`postil compare`: the same budget for several models, and one report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings
from rich.console import Console

from postil.cli.flags import flat, shorter, with_underscores
from postil.cli.output import lasting_output
from postil.comparing import as_table, compare, plan
from postil.comparing.running import Stopped
from postil.experiments import EXPERIMENTS
from postil.registry import REGISTRY
from postil.training.settings import TrainSettings, settings_from_dict

__all__ = ["run"]


def run(argv: list[str]) -> int:
    r"""Train the models that are named, each with the same budget and seeds, and report."""
    argv = with_underscores(argv)
    first = _parse(argv, TrainSettings())
    names, seeds = first["names"], _seeds(first["seeds"])
    if len(set(names)) < len(names):
        raise ValueError(f"a name is given twice: {' '.join(names)}")
    # The flags are read once for each contender, over its own defaults: so they change all of them alike.
    base = first["experiment"]
    settings = {name: _settings(_parse(argv, own_settings(name, base))) for name in names}
    contenders = plan(settings, equal_parameters=first["equal_parameters"])
    out = Path(first["out"] or "runs/comparison")
    console = Console(highlight=False)
    for each in contenders:
        console.print(f"{each.name}: {each.parameters:,} parameters", markup=False)
    try:
        with lasting_output():
            document = compare(contenders, seeds, out, console=console)
    except Stopped as stopped:
        console.print(str(stopped))
        return stopped.code
    console.print(as_table(document), crop=False)
    console.print(f"the report is {out / 'index.html'}, also as report.md and results.json", markup=False)
    return 0


def own_settings(name: str, base: str | None = None) -> TrainSettings:
    r"""Give an experiment's settings, or for a mixer those of the experiment `base` or the defaults.

    How long to train is left open: the budget is the comparison's.

    Raises:
        ValueError: there is no experiment or mixer of this name.
    """
    if base is not None and base not in EXPERIMENTS:
        raise ValueError(f"experiment={base!r} is not known; there are {', '.join(EXPERIMENTS)}")
    if name in REGISTRY and (base is not None or name not in EXPERIMENTS):
        settings = TrainSettings() if base is None else EXPERIMENTS[base]
        options = settings.model.options if settings.mixer == name else {}
        settings = replace(settings, mixer=name, model=replace(settings.model, options=options))
    elif name in EXPERIMENTS and base is None:
        settings = EXPERIMENTS[name]
    else:
        known = ", ".join(REGISTRY if base else dict.fromkeys([*EXPERIMENTS, *REGISTRY]))
        raise ValueError(f"{name!r} is no mixer{'' if base else ' or experiment'}; there are {known}")
    return replace(settings, updates=None, epochs=None, max_tokens=None, max_time=None)


def _parse(argv: list[str], defaults: TrainSettings) -> dict[str, Any]:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog="postil compare",
        description="Train several models with the same budget and report. Names are experiments, each with "
        "its own settings, or mixers; with --experiment NAME all are mixers on the settings of that one. The "
        "settings below change all of them alike.",
        exit_on_error=False,
    )
    parser.add_class_arguments(TrainSettings, as_group=False)
    parser.set_defaults(flat(defaults.to_dict()))
    parser.add_argument("names", nargs="+", help="experiments or mixers, such as transformer aft-local")
    parser.add_argument("--seeds", type=str, default="1", help="seeds with a comma between them: 1,2,3")
    parser.add_argument(
        "--equal_parameters",
        action="store_true",
        help="give all but the first the d_ff that brings them nearest to the size of the first",
    )
    try:
        return parser.parse_args(argv).as_dict()
    except ArgumentError as error:
        raise ValueError(shorter(str(error))) from None


def _settings(values: dict[str, Any]) -> TrainSettings:
    own = ("names", "seeds", "equal_parameters")
    return settings_from_dict({name: value for name, value in values.items() if name not in own})


def _seeds(text: str) -> list[int]:
    try:
        return [int(number) for number in str(text).split(",")]
    except ValueError:
        raise ValueError(f"--seeds: {text!r} is no list of whole numbers such as 1,2,3") from None
