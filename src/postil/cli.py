r"""The command line: `postil train`, `sample`, `data`, `info`, `pages`.

Each command is one function from its arguments to an exit code. A command imports what it needs when it is
called, so that `postil pages` does not wait for PyTorch. Mistakes of the user end with one line and code 2;
anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["main"]

USAGE = """\
usage: postil COMMAND ...

  train    train a model on a text          postil train --experiment transformer --out runs/transformer
  sample   continue a prompt                postil sample runs/transformer --prompt "It is "
  info     what a run, or this machine, is  postil info runs/transformer
  data     look at a text as tokens         postil data tiny-shakespeare
  pages    make an annotated site           postil pages build src/postil --out site

postil COMMAND --help says more. Options may be written with dashes or underscores."""


def main(argv: list[str] | None = None) -> int:
    r"""Run a command; return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if argv[0] == "--version":
        from postil import __version__

        print(f"postil {__version__}")
        return 0
    command = COMMANDS.get(argv[0])
    if command is None:
        print(f"postil: {argv[0]!r} is not a command; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    warnings.showwarning = _warn
    try:
        return command(argv[1:])
    except BrokenPipeError:
        # Whoever read our output has had enough (`postil sample ... | head`). Python would complain again
        # when it flushes at exit, so its output goes nowhere from here on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except _mistakes() as error:
        print(f"postil {argv[0]}: error: {_one_line(error)}", file=sys.stderr)
        return 3 if isinstance(error, FloatingPointError) else 2


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


# Where in our source a warning was raised is of no use to someone at a terminal.
def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"postil: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _mistakes() -> tuple[type[BaseException], ...]:
    if "postil.training.checkpoints" not in sys.modules:
        return (ValueError, ModuleNotFoundError)
    from postil.training.checkpoints import CheckpointError
    from postil.training.run_directory import RunDirectoryError

    return (ValueError, ModuleNotFoundError, CheckpointError, RunDirectoryError, FloatingPointError)


# ## postil train
def train(argv: list[str]) -> int:
    r"""Train a model: defaults, then the experiment, then the configuration file, then the flags."""
    argv = with_underscores(argv)
    from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

    from postil.experiments import EXPERIMENTS
    from postil.training.run import train as run_training
    from postil.training.settings import TrainSettings, settings_from_dict

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
    parser.set_defaults(_flat(_defaults(argv, EXPERIMENTS).to_dict()))
    try:
        values = parser.parse_args(_with_toml(argv)).as_dict()
    except ArgumentError as error:
        raise ValueError(_short(_one_line(error))) from None
    resume, overwrite = values.pop("resume"), values.pop("overwrite")
    values.pop("config")
    outcome = run_training(settings_from_dict(values), resume=resume, overwrite=overwrite)
    said = "" if outcome.bits is None else f"; the whole validation text at {outcome.bits:.3f} {outcome.unit}"
    print(f"{outcome.reason}, {outcome.update} so far{said}; the run is in {outcome.path}")
    return outcome.exit_code


# The parser's own message for a wrong value runs over seven lines.
def _short(message: str) -> str:
    match = re.search(r'key "(?P<key>[^"]+)":.*Given value: (?P<value>.*)', message)
    if match is None:
        return message
    kinds = [
        kind
        for kind in dict.fromkeys(re.findall(r"<class '(\w+)'>", message))
        if kind not in ("NoneType", "str")
    ]
    return f"--{match['key']}: {match['value']!r} is not {' or '.join(kinds) or 'possible here'}"


# An experiment, or the record of the run that is resumed, takes the place of the defaults; so it has to be
# known before the flags are read.
def _defaults(argv: list[str], experiments: dict[str, Any]) -> Any:
    from postil.training.settings import TrainSettings, settings_from_dict

    out, name = _value(argv, "--out"), _value(argv, "--experiment")
    record = Path(out) / "run.json" if out else None
    if _value(argv, "--resume") and record is not None and record.exists():
        try:
            return settings_from_dict(json.loads(record.read_text(encoding="utf-8"))["settings"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{record}: cannot be read, so the run cannot be resumed from it: {error}"
            ) from None
    if name is None:
        return TrainSettings()
    if name not in experiments:
        raise ValueError(f"experiment={name!r} is not known; there are {', '.join(experiments)}")
    return experiments[name]


def _value(argv: list[str], flag: str) -> str | None:
    for index, argument in enumerate(argv):
        if argument == flag and index + 1 < len(argv):
            return argv[index + 1]
        if argument.startswith(flag + "="):
            return argument.partition("=")[2]
    return None


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in values.items():
        nested = isinstance(value, dict) and name != "options"
        flat |= _flat(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return flat


# The parser reads YAML, and JSON with it; a TOML file is turned into JSON on its way.
def _with_toml(argv: list[str]) -> list[str]:
    path = _value(argv, "--config")
    if path is None or not path.endswith(".toml"):
        return argv
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pyright: ignore[reportMissingImports]
    try:
        text = json.dumps(tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return [text if a == path else f"--config={text}" if a == f"--config={path}" else a for a in argv]


def with_underscores(argv: list[str]) -> list[str]:
    r"""Write `--max-time` as `--max_time`, up to `=`; values and single dashes stay."""
    return [_underscored(argument) if argument.startswith("--") else argument for argument in argv]


def _underscored(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


# ## postil sample
def sample(argv: list[str]) -> int:
    r"""Continue a prompt with a trained model, character by character."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="postil sample", description="Continue a prompt with a trained model."
    )
    parser.add_argument("run", help="folder of a run, or of one checkpoint")
    parser.add_argument("--prompt", help="the text to continue; default: that of the training")
    parser.add_argument(
        "--prompt-file", metavar="FILE", help="read the prompt from a file, or - for standard input"
    )
    parser.add_argument("--tokens", type=int, default=500, help="how many tokens to write (default 500)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest tokens only")
    parser.add_argument(
        "--top-p", type=float, help="draw from the fewest tokens that have probability p together"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed writes the same text (default 0)")
    parser.add_argument("--checkpoint", default="auto", help="auto (latest), best, or a checkpoint's name")
    arguments = parser.parse_args(argv)
    from postil.sampling import Sampler, stream
    from postil.text import read_text
    from postil.training.display import visible
    from postil.training.saved import load_run

    sampler = Sampler(arguments.temperature, arguments.top_k, arguments.top_p)
    run = load_run(arguments.run, arguments.checkpoint)
    prompt = arguments.prompt if arguments.prompt is not None else run.settings.prompt
    if arguments.prompt_file:
        prompt = read_text(arguments.prompt_file)
    # On a screen control characters are shown, not obeyed; a file gets what the model wrote.
    shown = visible if sys.stdout.isatty() else str
    ids = run.tokenizer.encode(prompt).tolist()
    words = stream(run.model, [ids], tokens=arguments.tokens, sampler=sampler, seed=arguments.seed)
    text = run.tokenizer.stream()
    print(shown(prompt), end="", flush=True)
    for _, token in words:
        print(shown(text.feed(token)), end="", flush=True)
    print(shown(text.flush()))
    return 0


# ## postil info
def info(argv: list[str]) -> int:
    r"""Say what a run is and how it did, or, without a run, what this installation can do."""
    import argparse

    parser = argparse.ArgumentParser(prog="postil info", description="Show a run, or this installation.")
    parser.add_argument("run", nargs="?", help="folder of a run")
    arguments = parser.parse_args(argv)
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _run_facts(Path(arguments.run)) if arguments.run else _machine_facts():
        table.add_row(f"[bold]{name}[/]", value)
    Console(highlight=False).print(table)
    return 0


def _run_facts(path: Path) -> list[tuple[str, str]]:
    from rich.markup import escape

    from postil.training.checkpoints import steps
    from postil.training.curves import read_metrics

    try:
        run = json.loads((path / "run.json").read_text(encoding="utf-8"))
        s = run["settings"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is not the folder of a run: {error}") from None
    metrics = read_metrics(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []
    valid = [line for line in metrics if line["kind"] in ("valid", "final")]
    facts = [
        ("mixer", s["mixer"]),
        ("parameters", f"{run['parameters']:,}"),
        ("text", f"{run['corpus']['name']} ({run['corpus']['size']:,} bytes, {run['corpus']['origin']})"),
        (
            "tokens",
            f"{run['tokenizer']}, {run['vocab_size']} kinds, {run['tokens']['training']:,} for training",
        ),
        ("updates", f"{metrics[-1]['update'] if metrics else 0} of {run['updates'] or 'no fixed number'}"),
    ]
    if "unigram_bits" in run:
        facts.append(("unigram entropy", f"{run['unigram_bits']:.3f} {run['unit']}, the mark to beat"))
    if valid:
        best = min(valid, key=lambda line: line["bits"])
        facts.append(
            ("last validation", f"{valid[-1]['bits']:.3f} {run['unit']} at update {valid[-1]['update']}")
        )
        facts.append(("best validation", f"{best['bits']:.3f} {run['unit']} at update {best['update']}"))
    facts.append(("checkpoints", ", ".join(each.name for each in steps(path / "checkpoints")) or "none"))
    facts.append(("versions", ", ".join(f"{name} {number}" for name, number in run["versions"].items())))
    return [(name, escape(value)) for name, value in facts]


def _machine_facts() -> list[tuple[str, str]]:
    import torch

    from postil import REGISTRY, __version__

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [
        ("postil", __version__),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("processor", torch.backends.cpu.get_cpu_capability()),
        ("GPUs", ", ".join(gpus) or "none"),
        ("mixers", ", ".join(REGISTRY)),
    ]


# ## postil data
def data(argv: list[str]) -> int:
    r"""Show what a text is as tokens."""
    import argparse

    parser = argparse.ArgumentParser(prog="postil data", description="Look at a text as tokens.")
    parser.add_argument(
        "text", nargs="?", help="a corpus by name, a file, a folder, or - (default: as train)"
    )
    parser.add_argument("--tokenizer", default="characters", help="characters, bytes, words or bpe")
    parser.add_argument("--vocab-size", type=int, help="for bpe and words")
    arguments = parser.parse_args(argv)
    from rich.console import Console
    from rich.table import Table

    from postil.text import build_tokenizer, default_corpus, encode_corpus, load_corpus, split
    from postil.text.entropy import unigram_bits

    corpus = load_corpus(arguments.text) if arguments.text else default_corpus()
    tokenizer = build_tokenizer(arguments.tokenizer, corpus, vocab_size=arguments.vocab_size)
    tokens = encode_corpus(corpus, tokenizer)
    training, validation = split(tokens)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in (
        ("text", f"{corpus.name}, {corpus.origin}"),
        ("size", f"{corpus.size:,} bytes"),
        ("SHA-256", corpus.sha256),
        ("tokens", f"{len(tokens):,}: {len(training):,} for training, {len(validation):,} for validation"),
        ("vocabulary", f"{tokenizer.vocab_size:,} {tokenizer.kind}"),
        ("unigram entropy", f"{unigram_bits(training, validation, tokenizer.vocab_size):.3f} bits a token"),
        ("kept in", str(tokens.file.path)),
    ):
        table.add_row(f"[bold]{name}[/]", value)
    if corpus.note:
        print(corpus.note, file=sys.stderr)
    Console(highlight=False).print(table)
    return 0


# ## postil pages
def pages(argv: list[str]) -> int:
    r"""Hand over to the publisher, which knows nothing of the rest."""
    from postil.pages.cli import main as publish

    return publish(argv)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "sample": sample,
    "info": info,
    "data": data,
    "pages": pages,
}

if __name__ == "__main__":
    sys.exit(main())
