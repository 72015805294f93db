r"""`postil train`: defaults, then the experiment, then the configuration file, then the flags."""

from __future__ import annotations

import json
from pathlib import Path

from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from postil.cli.configuration import read_configuration
from postil.cli.flags import flat, shorter, with_underscores
from postil.cli.output import lasting_output
from postil.experiments import EXPERIMENTS
from postil.training.run import train
from postil.training.settings import TrainSettings, settings_from_dict

__all__ = ["run"]

PICTURES = "aft-images"


def run(argv: list[str]) -> int:
    r"""Train a model: defaults, then the experiment, then the configuration file, then the flags."""
    argv = with_underscores(argv)
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog="postil train", description="Train a language model on a text.", exit_on_error=False
    )
    parser.add_argument(
        "--config", action="config", help="YAML, JSON or TOML file with any of the settings below"
    )
    parser.add_argument(
        "--resume", type=str, default=None, help="auto, or the path of a checkpoint to go on from"
    )
    parser.add_argument("--overwrite", action="store_true", help="remove the run that is in the folder")
    parser.add_class_arguments(TrainSettings, as_group=False)
    parser.set_defaults(flat(_defaults(argv).to_dict()))
    try:
        values = parser.parse_args(_with_configuration(argv)).as_dict()
    except ArgumentError as error:
        raise ValueError(shorter(str(error))) from None
    resume, overwrite = values.pop("resume"), values.pop("overwrite")
    values.pop("config")
    with lasting_output():
        outcome = train(settings_from_dict(values), resume=resume, overwrite=overwrite)
        said = ""
        if outcome.bits is not None and outcome.accuracy is not None:
            said = f"; the whole validation text at {outcome.bits:.3f} {outcome.unit}"
            said += f", {100 * outcome.accuracy:.1f} % right"
        print(f"{outcome.reason}, {outcome.update} so far{said}; the run is in {outcome.path}")
    return outcome.exit_code


# An experiment, or the record of the run that is resumed, takes the place of the defaults; so it has to be
# known before the flags are read.
def _defaults(argv: list[str]) -> TrainSettings:
    out, name = _value(argv, "--out"), _value(argv, "--experiment")
    record = Path(out) / "run.json" if out else None
    if _value(argv, "--resume") and record is not None and record.exists():
        try:
            return settings_from_dict(json.loads(record.read_text(encoding="utf-8"))["settings"])
        except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{record}: cannot be read, so the run cannot be resumed from it: {error}"
            ) from None
    if name is None:
        return TrainSettings()
    if name == PICTURES:
        raise ValueError(
            f"experiment={name!r} is of pictures, not of tokens that a text could have, and has a command of "
            f"its own: python -m postil.experiments.aft_images"
        )
    if name not in EXPERIMENTS:
        raise ValueError(f"experiment={name!r} is not known; there are {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]


def _value(argv: list[str], flag: str) -> str | None:
    for index, argument in enumerate(argv):
        if argument == flag and index + 1 < len(argv):
            return argv[index + 1]
        if argument.startswith(flag + "="):
            return argument.partition("=")[2]
    return None


# The parser takes a file's content in the place of its name.
def _with_configuration(argv: list[str]) -> list[str]:
    flag, read = "--config", []
    for before, argument in zip(["", *argv], argv, strict=False):
        name, _, path = argument.partition("=")
        if before == flag:
            argument = read_configuration(Path(argument))
        elif name == flag and path:
            argument = f"{flag}={read_configuration(Path(path))}"
        read.append(argument)
    return read
