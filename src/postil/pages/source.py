r"""Source: a Python file, cut into rows.

A page shows notes on the left and code on the right. This module decides which lines stand side by side, and
nothing else. It reads the *text* of a file: evaluated docstrings have lost their backslashes (`\theta` begins
with a tab), and `str.splitlines` cuts at characters that Python does not count as line ends.

One law holds for every file that Python can parse, and the tests hold it over the whole standard library:

> every line of the source lies in exactly one part of exactly one row, in order.

A **row** is a run of lines that begins at a definition or at a full-line comment. Its **parts** are runs of
one kind: `comment` and `docstring` are notes, `code` is code.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Definition", "Part", "Row", "Source", "SourceError", "read_source", "split"]

Kind = Literal["code", "comment", "docstring"]


class SourceError(ValueError):
    r"""A fault in somebody's source, at a place: prints as `file:line: what is wrong`."""

    def __init__(self, path: str, line: int, message: str):
        super().__init__(f"{path}:{line}: {message}")
        self.path, self.line, self.message = path, line, message


@dataclass(frozen=True)
class Part:
    r"""Lines `first` to `last` (from 1, inclusive), all notes of one kind or all code."""

    kind: Kind
    first: int
    last: int


@dataclass(frozen=True)
class Row:
    r"""Notes and the code beside them; `name` is what is defined here, `scope` what that stands in."""

    parts: tuple[Part, ...]
    scope: str
    name: str

    @property
    def first(self) -> int:
        r"""First line of the row."""
        return self.parts[0].first

    @property
    def last(self) -> int:
        r"""Last line of the row."""
        return self.parts[-1].last

    def lines_of(self, *kinds: Kind) -> list[int]:
        r"""The numbers of the row's lines of these kinds."""
        return [n for part in self.parts if part.kind in kinds for n in range(part.first, part.last + 1)]


@dataclass(frozen=True)
class Definition:
    r"""A class or function by its lines: decorators, `def`, first of the body, last, docstring."""

    name: str
    first: int
    header: int
    body: int
    last: int
    docstring: tuple[int, int] | None
    is_nested: bool


@dataclass(frozen=True)
class Source:
    r"""A file that has been read: its lines without line ends, its syntax tree, where its notes are."""

    path: str
    lines: tuple[str, ...]
    tree: ast.Module
    definitions: tuple[Definition, ...]
    docstring: tuple[int, int] | None
    comments: tuple[tuple[int, int], ...]

    def text(self, first: int, last: int) -> str:
        r"""Lines `first` to `last`, joined."""
        return "\n".join(self.lines[first - 1 : last])


# Python itself reads a file this way: the encoding from its first two lines, then universal newlines. A form
# feed or U+2028 inside a line is an ordinary character there, and so it is here.
def read_source(path: Path, shown_as: str | None = None) -> Source:
    r"""Read and parse one file; nothing in it is ever run.

    Raises:
        SourceError: the file cannot be decoded or parsed; the message names the line.
    """
    name = shown_as or str(path)
    data = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise SourceError(name, 1, f"not readable as text: {error}") from error
    return parse(text, name)


def parse(text: str, name: str = "<text>") -> Source:
    r"""Parse source text.

    Raises:
        SourceError: Python cannot parse it, or it is nested deeper than Python's parser goes.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    try:
        # An invalid escape such as "\d" only warns, and the warning is for the author of the file, not for
        # us.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
        comments = tuple(_full_line_comments(text))
    except SyntaxError as error:
        raise SourceError(name, error.lineno or 1, f"Python cannot read this: {error.msg}") from error
    except (RecursionError, MemoryError):
        raise SourceError(name, 1, "nested deeper than Python's parser can go") from None
    except (ValueError, tokenize.TokenError) as error:
        raise SourceError(name, 1, f"Python cannot read this: {error}") from error
    docstring = _docstring_lines(tree.body, lines)
    return Source(name, tuple(lines), tree, tuple(_definitions(tree, lines)), docstring, comments)


# A comment is a token. Looking for lines that begin with "#" would find them inside strings too. Comments
# inside brackets belong to the expression they stand in, and remarks to tools are not for readers.
_FOR_TOOLS = re.compile(
    r"#(!|\s*(type:|noqa|fmt:|pragma|pylint:|mypy:|pyright:|ruff:|isort:|coding[:=]|-\*-|%%|region|endregion))"
)


def _full_line_comments(text: str) -> Iterator[tuple[int, int]]:
    depth, first, last = 0, 0, -1
    for token in tokenize.generate_tokens(io.StringIO(text, newline="\n").readline):
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        if token.type != tokenize.COMMENT or depth:
            continue
        line, column = token.start
        if token.line[:column].strip() or _FOR_TOOLS.match(token.string):
            continue
        if line != last + 1:
            if first:
                yield first, last
            first = line
        last = line
    if first:
        yield first, last


# What `ast` calls a docstring is one, whatever its quotes and prefix. Only when it shares a line with code
# (`def f(): "..."`, or `"..."; x = 1`) it has no lines of its own, and stays code. Columns count bytes.
def _docstring_lines(body: list[ast.stmt], lines: list[str]) -> tuple[int, int] | None:
    node = body[0] if body else None
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return None
    if not isinstance(node.value.value, str):
        return None
    first, last = node.lineno, node.end_lineno or node.lineno
    before = lines[first - 1].encode()[: node.col_offset].decode()
    after = lines[last - 1].encode()[node.end_col_offset :].decode().strip()
    return None if before.strip() or (after and not after.startswith("#")) else (first, last)


# Only statements are walked, and with a list instead of recursion: an expression a thousand levels deep is
# none of our business, and must not cost us the stack.
def _definitions(tree: ast.Module, lines: list[str]) -> Iterator[Definition]:
    stack: list[tuple[ast.stmt, str, bool]] = [(node, "", False) for node in reversed(tree.body)]
    while stack:
        node, scope, nested = stack.pop()
        inside, inside_nested = scope, nested
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            inside = f"{scope}.{node.name}" if scope else node.name
            inside_nested = nested or not isinstance(node, ast.ClassDef)
            docstring = _docstring_lines(node.body, lines)
            last = node.end_lineno or node.lineno
            yield Definition(inside, first, node.lineno, node.body[0].lineno, last, docstring, nested)
        stack.extend((child, inside, inside_nested) for child in reversed(list(_statements(node))))


def _statements(node: ast.stmt) -> Iterator[ast.stmt]:
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            if isinstance(child, ast.stmt):
                yield child
            elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
                yield from child.body


# Every line gets a kind; then the lines at which rows begin are collected; then both are cut together.
def split(source: Source) -> list[Row]:
    r"""Cut a file into rows.

    Cost: linear in the lines, times the depth of definitions.
    """
    if not source.lines:
        return []
    kinds = _kinds(source)
    scopes = [""] * len(kinds)
    for definition in source.definitions:
        size = definition.last - definition.first + 1
        scopes[definition.first - 1 : definition.last] = [definition.name] * size
    named = {d.first: d.name for d in reversed(source.definitions) if not d.is_nested or d.docstring}
    rows = []
    for first, last in _spans(_row_starts(source, kinds, named), len(kinds)):
        parts = tuple(_parts(kinds, first, last))
        lines = range(first, last + 1)
        code = next((n for n in lines if kinds[n - 1] == "code" and source.lines[n - 1].strip()), first)
        name = named.get(code, "")
        scope = scopes[code - 1] if not name else name.rpartition(".")[0]
        rows.append(Row(parts, scope, name))
    return rows


def _kinds(source: Source) -> list[Kind]:
    kinds: list[Kind] = ["code" for _ in source.lines]
    # A comment between two decorators would tear them from their function: it stays with them, as code.
    header = {n for d in source.definitions for n in range(d.first, d.header)}
    for first, last in source.comments:
        if first not in header:
            kinds[first - 1 : last] = ["comment" for _ in range(first, last + 1)]
    for span in [source.docstring, *(d.docstring for d in source.definitions)]:
        if span:
            kinds[span[0] - 1 : span[1]] = ["docstring" for _ in range(span[0], span[1] + 1)]
    return kinds


# The introduction ends with the module's docstring. After it a row begins at a comment, at a definition, and
# where a definition has ended. A comment directly above a definition takes the definition into its row, and a
# comment directly below a `def` line stays in the row of the `def`.
def _row_starts(source: Source, kinds: list[Kind], named: dict[int, str]) -> list[int]:
    intro = source.docstring[1] if source.docstring else 0
    ended = {d.last + 1 for d in source.definitions if d.first in named}
    below = {n for d in source.definitions if d.first in named for n in range(d.header + 1, d.body)}
    starts, has_code, after = [1], False, False
    for line, kind in enumerate(kinds, 1):
        if line <= intro:
            continue
        after = after or line in ended
        blank = not source.lines[line - 1].strip()
        if kind == "comment":
            begins = has_code and (line == 1 or kinds[line - 2] != "comment") and line not in below
        else:
            begins = has_code and kind == "code" and not blank and (after or line in named)
        if begins or line == intro + 1 > 1:
            starts.append(line)
            has_code = False
        if kind != "comment" and not blank:
            has_code, after = True, False
    return starts


def _spans(starts: list[int], end: int) -> Iterator[tuple[int, int]]:
    for i, first in enumerate(starts):
        yield first, starts[i + 1] - 1 if i + 1 < len(starts) else end


def _parts(kinds: list[Kind], first: int, last: int) -> Iterator[Part]:
    begin = first
    for line in range(first, last + 1):
        if line == last or kinds[line] != kinds[begin - 1]:
            yield Part(kinds[begin - 1], begin, line)
            begin = line + 1
