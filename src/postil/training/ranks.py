r"""A run in several processes: the request goes to each of them, and the first one's outcome comes back.

    python -m postil.training.ranks '{"settings": {...}, "resume": null, ...}'

is one of the processes. Whoever calls `train_in_ranks` need not know that there are any: it returns what the
run in one process returns, and raises what that raises.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from typing import Any

from postil.text import TextError
from postil.training.checkpoints import CheckpointError
from postil.training.engine import TIMEOUT
from postil.training.loop import NonFiniteError
from postil.training.processes import Ended, RankError, meeting_point, report, report_error, run_ranks
from postil.training.run_directory import RunDirectoryError

__all__ = ["train_in_ranks"]

# Errors that the user can do something about. They cross over by name, since an object that crosses as it is
# would have to be a pickle.
MISTAKES = {
    kind.__name__: kind
    for kind in (
        ValueError,
        ModuleNotFoundError,
        TextError,
        CheckpointError,
        RunDirectoryError,
        NonFiniteError,
        RankError,
    )
}


def train_in_ranks(request: dict[str, Any], count: int) -> dict[str, Any]:
    r"""Train in `count` processes of this machine; return the outcome as the first one reported it.

    Raises:
        SystemExit: the run was asked to stop before it had anything to save.
        Exception: as `train`; and `RankError`, naming the process that was lost.
    """
    command = [sys.executable, "-m", "postil.training.ranks", json.dumps(request)]
    ended = run_ranks(command, count)
    if all(each.well for each in ended):
        return next(each.report["outcome"] for each in ended if each.report and each.rank == 0)
    raise _cause(ended)


# One process fails and takes the others with it. Each tells what it knows; what was a cause comes before
# what was only noticed.
def _cause(ended: list[Ended]) -> BaseException:
    errors = [(each.rank, each.report["error"]) for each in ended if each.report and "error" in each.report]
    own = sorted((e for e in errors if e[1]["kind"] not in ("RankError", "SystemExit")), key=lambda e: e[0])
    if own:
        rank, error = own[0]
        where = "" if len(own) == len(ended) or rank == 0 else f"rank {rank}: "
        if error["kind"] in MISTAKES:
            return MISTAKES[error["kind"]](where + error["text"])
        return RankError(f"rank {rank} failed: {error['kind']}: {error['text']}")
    asked = [each for each in ended if each.code in (130, 143)]
    silent = [each for each in ended if each.report is None and not each.stopped and each not in asked]
    if silent:
        return RankError(f"{silent[0]}; the others were ended")
    noticed = [error["text"] for _, error in errors if error["kind"] == "RankError"]
    return RankError(noticed[0]) if noticed else SystemExit(asked[0].code if asked else 1)


def main() -> int:
    r"""Be one of the processes."""
    # `run` knows this module, which asks for the processes; here, as a program, it is the other way round.
    from rich.console import Console

    from postil.training.run import train
    from postil.training.settings import settings_from_dict

    request = json.loads(sys.argv[1])
    warnings.showwarning = _warn
    store = meeting_point(TIMEOUT)
    try:
        outcome = train(
            settings_from_dict(request["settings"]),
            resume=request["resume"],
            overwrite=request["overwrite"],
            console=Console(highlight=False, quiet=request["quiet"]),
        )
    except BaseException as error:
        report_error(error, store)
        if type(error).__name__ not in MISTAKES and not isinstance(error, SystemExit):
            traceback.print_exc()
        return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    report({"outcome": outcome.to_dict()}, store)
    return outcome.exit_code


# All processes meet the same damaged checkpoint and the same short text; one of them is enough to say so.
def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    if os.environ["LOCAL_RANK"] == "0":
        print(f"postil: warning: {' '.join(str(message).split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
