r"""The command line of the publisher.

```sh
postil pages build src/postil --out site
postil pages serve site
postil pages check src/postil
postil pages notebooks src/postil
postil pages translate update src/postil
```

Each command is a plain function here, so a program can call what a person can type.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from postil.pages.catalogue import po_file, read_catalog, template, update, write_catalogue
from postil.pages.checking import check_project
from postil.pages.notebook import write_notebooks
from postil.pages.project import Project, ProjectError, open_project
from postil.pages.reading import Fault, Page, read_page
from postil.pages.serving import make_server, serve_forever, watch
from postil.pages.site import BuildError, Built, build_site
from postil.pages.staging import StagingError

__all__ = [
    "add_commands",
    "build",
    "check",
    "main",
    "notebooks",
    "serve",
    "translate_extract",
    "translate_progress",
    "translate_update",
]


def build(path: Path, out: Path, *, lenient: bool = False, run: bool = False, **settings: Any) -> Built:
    r"""Build the site of a package, folder or file; `settings` are those of `pages.toml`.

    Raises:
        ProjectError: `path` or a setting cannot be used.
        BuildError: a note holds a fault; its message has one `file:line: fault` a line.
        StagingError: `out` cannot be used.
    """
    return build_site(open_project(path, **settings), out, lenient=lenient, run=run)


def check(path: Path, *, complete: bool = True, **settings: Any) -> list[Fault]:
    r"""Look for broken links and anchors, faulty formulas, translations and colours; nothing is written."""
    return check_project(open_project(path, **settings), complete=complete)


def notebooks(path: Path, **settings: Any) -> list[Path]:
    r"""Write a notebook of every page that brings something to try; give their paths."""
    return write_notebooks(open_project(path, **settings))


def serve(site: Path, *, host: str = "127.0.0.1", port: int = 8000, watched: Path | None = None) -> None:
    r"""Show a site until interrupted; with `watched`, build it again whenever that source changes."""
    server = make_server(site, host, port)
    stop = threading.Event()
    if watched is not None:
        threading.Thread(
            target=watch, args=(watched, lambda: _rebuild(watched, site), stop), daemon=True
        ).start()
    shown = f"[{host}]" if ":" in host else host
    print(f"http://{shown}:{server.server_address[1]}/ shows {site}; stop with Ctrl-C", flush=True)
    try:
        serve_forever(server)
    finally:
        stop.set()


def _rebuild(path: Path, site: Path) -> None:
    try:
        build(path, site, lenient=True)
    except (BuildError, ProjectError, StagingError, OSError) as error:
        print(error, file=sys.stderr)


def _pages(project: Project) -> Iterator[Page]:
    for module in project.modules:
        page = read_page(project, module)
        if page.messages():
            yield page


def translate_extract(path: Path, out: Path, **settings: Any) -> int:
    r"""Write a template of messages for every page into `out`; return how many messages."""
    project = open_project(path, **settings)
    count = 0
    for page in _pages(project):
        catalog = template(page.messages())
        write_catalogue(out / f"{page.module.name or '__init__'}.pot", catalog)
        count += len(catalog)
    return count


def translate_update(path: Path, **settings: Any) -> int:
    r"""Bring every PO file of every language to the present notes; return how many files changed."""
    project = open_project(path, **settings)
    changed = 0
    for language in project.languages:
        for page in _pages(project):
            file = po_file(project.locale, language, page.module.name)
            before = file.read_bytes() if file.is_file() else b""
            write_catalogue(file, update(read_catalog(file, language), template(page.messages(), language)))
            changed += file.read_bytes() != before
    return changed


def translate_progress(path: Path, **settings: Any) -> dict[str, tuple[int, int]]:
    r"""For each language, how many blocks have a current translation, and how many there are."""
    project = open_project(path, **settings)
    result = {}
    for language in project.languages:
        done = total = 0
        for page in _pages(project):
            catalog = read_catalog(po_file(project.locale, language, page.module.name), language)
            current = {str(m.id) for m in catalog or () if m.string and not m.fuzzy}
            blocks = {text for text, _ in page.messages()}
            done, total = done + len(blocks & current), total + len(blocks)
        result[language] = (done, total)
    return result


def add_commands(parser: argparse.ArgumentParser) -> None:
    r"""Add the publisher's commands to a parser; each sets `action`, a function of the parsed arguments."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = _command(commands, "build", _build, "build a site from annotated Python")
    command.add_argument("--out", type=Path, required=True, help="the folder of the site")
    command.add_argument(
        "--lenient", action="store_true", help="show faulty formulas and links as text and go on"
    )
    command.add_argument("--run", action="store_true", help="run the pages' examples for shapes and plots")
    command.add_argument("--base-url", help="where the site will live, for search engines")
    command.add_argument("--repository", help="address of the repository, to link sources at their commit")
    command = _command(commands, "check", _check, "find broken links, formulas, translations and colours")
    command.add_argument("--partial", action="store_true", help="accept blocks that are not translated yet")
    command = _command(commands, "notebooks", _notebooks, "write the pages that bring something to try")
    command.add_argument("--repository", help="address of the repository, to open and install them from")
    command = commands.add_parser("serve", help="show a site on this machine")
    command.add_argument("site", type=Path, help="the folder of the site")
    command.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: this machine only)"
    )
    command.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000; 0: any)")
    command.add_argument("--watch", type=Path, metavar="PATH", help="build again when this source changes")
    command.set_defaults(action=_serve)
    translate = commands.add_parser("translate", help="work on translations of the notes")
    kinds = translate.add_subparsers(dest="kind", required=True, metavar="KIND")
    command = _command(kinds, "extract", _extract, "write templates of all messages")
    command.add_argument("--out", type=Path, required=True, help="folder of the templates")
    _command(kinds, "update", _update, "bring the PO files to the present notes")
    _command(kinds, "progress", _progress, "show how much is translated")


def _command(commands: Any, name: str, action: Any, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.add_argument("path", type=Path, help="a package, a folder or a file")
    command.add_argument("--languages", nargs="*", help="languages besides English, such as zh_CN ja")
    command.add_argument("--locale", help="the folder of the translations")
    command.add_argument("--papers", help="the table of papers that pages cite")
    command.set_defaults(action=action)
    return command


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ("languages", "locale", "papers", "base_url", "repository")
    given = {name: getattr(args, name, None) for name in names}
    # A path that a person types is seen from where they stand, not from where pages.toml is.
    for name in ("locale", "papers"):
        if given[name] is not None:
            given[name] = str(Path(str(given[name])).resolve())
    return given


def _build(args: argparse.Namespace) -> int:
    built = build(args.path, args.out, lenient=args.lenient, run=args.run, **_settings(args))
    for warning in built.warnings:
        print(warning, file=sys.stderr)
    print(f"{args.out}: {built.pages} pages; {built.written} written, {built.reused} taken over")
    return 0


def _check(args: argparse.Namespace) -> int:
    faults = check(args.path, complete=not args.partial, **_settings(args))
    for fault in faults:
        print(fault)
    print(f"{len(faults)} fault{'' if len(faults) == 1 else 's'}", file=sys.stderr)
    return 1 if faults else 0


def _notebooks(args: argparse.Namespace) -> int:
    written = notebooks(args.path, **_settings(args))
    for path in written:
        print(path)
    if not written:
        print("no docstring of a page has a block that begins with ```python notebook", file=sys.stderr)
    return 0 if written else 1


def _serve(args: argparse.Namespace) -> int:
    serve(args.site, host=args.host, port=args.port, watched=args.watch)
    return 0


def _extract(args: argparse.Namespace) -> int:
    print(f"{args.out}: {translate_extract(args.path, args.out, **_settings(args))} messages")
    return 0


def _update(args: argparse.Namespace) -> int:
    print(f"{translate_update(args.path, **_settings(args))} files changed")
    return 0


def _progress(args: argparse.Namespace) -> int:
    for language, (done, total) in translate_progress(args.path, **_settings(args)).items():
        print(f"{language}: {done} of {total} blocks")
    return 0


# Generated text may end up on a terminal, where control characters are commands.
def _printable(text: object) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in str(text))


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
        print(_printable(error), file=sys.stderr)
        return 1
    except (ProjectError, StagingError, OSError, ValueError) as error:
        print(f"postil pages: {_printable(error)}", file=sys.stderr)
        return 2
