r"""The command line of the publisher.

```sh
postil pages build src/postil --out site
postil pages serve site
postil pages check src/postil
postil pages translate update src/postil
```

Each command is a plain function here, so a program can call what a person can type.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from postil.pages.project import ProjectError, open_project
from postil.pages.site import BuildError, Built, build_site
from postil.pages.staging import StagingError

__all__ = ["add_commands", "build", "main"]


def build(path: Path, out: Path, *, lenient: bool = False, run: bool = False, **settings: Any) -> Built:
    r"""Build the site of a package, folder or file; `settings` are those of `pages.toml`.

    Raises:
        ProjectError: `path` or a setting cannot be used.
        BuildError: a note holds a fault; its message has one `file:line: fault` a line.
        StagingError: `out` cannot be used.
    """
    project = open_project(path, **settings)
    return build_site(project, out, lenient=lenient, run=run)


def add_commands(parser: argparse.ArgumentParser) -> None:
    r"""Add the publisher's commands to a parser."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("build", help="build a site from annotated Python")
    command.add_argument("path", type=Path, help="a package, a folder or a file")
    command.add_argument("--out", type=Path, required=True, help="the folder of the site")
    command.add_argument(
        "--lenient", action="store_true", help="show faulty formulas and links as text and go on"
    )
    command.set_defaults(action=_build)


def _build(args: argparse.Namespace) -> int:
    built = build(args.path, args.out, lenient=args.lenient)
    for warning in built.warnings:
        print(warning, file=sys.stderr)
    print(f"{args.out}: {built.pages} pages; {built.written} written, {built.reused} taken over")
    return 0


def main(argv: list[str] | None = None) -> int:
    r"""Run one command; faults are printed, one a line, and give exit status 1, bad usage 2."""
    parser = argparse.ArgumentParser(
        prog="postil pages", description="Annotated Python as a side-by-side site."
    )
    add_commands(parser)
    args = parser.parse_args(argv)
    try:
        return args.action(args)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    except (ProjectError, StagingError) as error:
        print(f"postil pages: {error}", file=sys.stderr)
        return 2
