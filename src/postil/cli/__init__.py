r"""The command line: one word for each thing to do.

Each command is a module here with one function, `run`, from its arguments to an exit code. It is imported
when it is called, so that `postil pages` does not wait for PyTorch. Mistakes of the user end with one line
and code 2; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from typing import Any

from postil.cli.output import discard_output

__all__ = ["main"]

COMMANDS = ("train", "sample", "info", "data", "compare", "show", "bench", "export", "import", "pages")

USAGE = """\
usage: postil COMMAND ...

  train    train a model on a text          postil train --experiment transformer --out runs/transformer
  sample   continue a prompt                postil sample runs/transformer --prompt "It is "
  info     what a run, or this machine, is  postil info runs/transformer
  data     look at a text as tokens         postil data tiny-shakespeare
  compare  several models, one report       postil compare transformer aft-local --max-tokens 2000000
  show     pictures of what a model learnt  postil show runs/transformer --prompt "It is "
  bench    measure beside other libraries   postil bench aft
  export   give a model to others           postil export runs/transformer --to huggingface --out model
  import   take a model from others         postil import nanogpt ckpt.pt --text input.txt --out runs/gpt
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
    if argv[0] not in COMMANDS:
        print(f"postil: {argv[0]!r} is not a command; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            code = importlib.import_module(f"postil.cli.{argv[0]}").run(argv[1:])
            sys.stdout.flush()
            return code
    except BrokenPipeError:
        # Whoever read our output has had enough (`postil sample ... | head`).
        discard_output()
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _explained(argv[0], error)


# What a person can do something about is told in one line. Anything else is a bug of ours.
def _explained(command: str, error: Exception) -> int:
    text, code = _one_line(error), 3 if isinstance(error, FloatingPointError) else 2
    if isinstance(error, OSError):
        text = f"{error.filename or 'output'}: {error.strerror or error}"
        if error.filename is None:
            discard_output()
    elif type(error).__name__ == "RankError":
        # The name, not the class: whoever only builds pages has never loaded what trains. It names the rank
        # that was lost, which an advice on memory would hide.
        code = 5
    elif isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(text)):
        text, code = f"out of memory; what was saved is intact. {_LESS_MEMORY.get(command, '')}".strip(), 4
    elif not isinstance(error, _mistakes()):
        raise error
    print(f"postil {command}: error: {_shown(text)}", file=sys.stderr)
    return code


# PyTorch has a type of error for the memory of a GPU, and none for that of the machine.
_NO_MEMORY = re.compile(r"can't allocate memory|out of memory", re.IGNORECASE)
_LESS_MEMORY = {
    "train": "A smaller --optimizer.micro-batch-size needs less and gives the same result; "
    "then --resume auto goes on from the last checkpoint"
}


# An error repeats what it was given, and that may be a name somebody chose to trick a terminal with.
def _shown(text: str) -> str:
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


_LONGEST = 1500


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


# Where in our source a warning was raised is of no use to someone at a terminal.
def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"postil: warning: {_shown(' '.join(str(message).split()))}", file=sys.stderr)


def _mistakes() -> tuple[type[BaseException], ...]:
    if "postil.training.checkpoints" not in sys.modules:
        return (ValueError, ModuleNotFoundError)
    from postil.training.checkpoints import CheckpointError
    from postil.training.run_directory import RunDirectoryError

    return (ValueError, ModuleNotFoundError, CheckpointError, RunDirectoryError, FloatingPointError)
