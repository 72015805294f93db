r"""Highlighting: code with the few distinctions a reader uses.

Pygments finds the tokens; the syntax tree adds what tokens cannot know: which name is a parameter here, and
which name is being defined. Every span costs a node of the page, so only six kinds are told apart, and
neighbours of one kind share a span. Numbers are not among them: they look like nothing else.
"""

from __future__ import annotations

import ast
import html
from collections.abc import Iterator, Sequence
from functools import lru_cache

from pygments.lexer import Lexer
from pygments.lexers import PythonLexer, get_lexer_by_name
from pygments.token import Token, _TokenType
from pygments.util import ClassNotFound

from postil.pages.source import Source

__all__ = ["code_lines", "highlight_sample"]

Roles = dict[tuple[int, int], str]

# k keyword, s string, c comment, d defined here, p parameter, b built in
_KINDS = (
    (Token.Comment, "c"),
    (Token.Literal.String.Interpol, ""),
    (Token.Literal.String, "s"),
    (Token.Operator.Word, "k"),
    (Token.Keyword, "k"),
    (Token.Name.Decorator, "d"),
    (Token.Name.Builtin.Pseudo, ""),
    (Token.Name.Builtin, "b"),
    (Token.Name.Exception, "b"),
)


@lru_cache(maxsize=256)
def _kind(token: _TokenType) -> str:
    return next((name for kind, name in _KINDS if token in kind), "")


def code_lines(source: Source, terms: dict[str, str]) -> list[str]:
    r"""Every line of a file as HTML; `terms` gives the class of a name that stands for a symbol."""
    text = "\n".join(source.lines)
    roles = _roles(source)
    lexer = PythonLexer(stripnl=False, ensurenl=False, stripall=False)
    lines: list[list[tuple[str, str]]] = [[]]
    column = 0
    for _, token, value in lexer.get_tokens_unprocessed(text):
        kind = _kind(token)
        for i, piece in enumerate(value.split("\n")):
            if i:
                lines.append([])
                column = 0
            if not piece:
                continue
            if token in Token.Name:
                kind = terms.get(piece) or roles.get((len(lines), column)) or kind
            lines[-1].append((kind, piece))
            column += len(piece)
    return [_line(line) for line in lines[: len(source.lines)]] + [""] * (len(source.lines) - len(lines))


# The two most frequent kinds have elements of their own, shorter than one with a class. A page of code has
# some hundred of the others, so their classes go without quotes, as HTML allows.
_ELEMENTS = {"k": ("<b>", "</b>"), "p": ("<var>", "</var>"), "": ("", "")}


def _line(pieces: Sequence[tuple[str, str]]) -> str:
    merged: list[tuple[str, list[str]]] = []
    for kind, text in pieces:
        if merged and merged[-1][0] == kind and not kind.startswith("t"):
            merged[-1][1].append(text)
        else:
            merged.append((kind, [text]))
    written = []
    for kind, texts in merged:
        before, after = _ELEMENTS.get(kind, (f"<i class={kind}>", "</i>"))
        written.append(before + html.escape("".join(texts), False) + after)
    return "".join(written)


# A parameter keeps its role inside nested functions unless these take a parameter of the same name, which has
# the same role; so one pass over the functions is enough.
def _roles(source: Source) -> Roles:
    roles: Roles = {}
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            line = source.lines[node.lineno - 1]
            # The name follows the keyword; the tree gives only the place of the statement.
            start = line.find(node.name, len(line) - len(line.lstrip()) + 3)
            if start >= 0:
                roles[node.lineno, start] = "d"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for argument in _arguments(node.args):
                roles[_place(source, argument.lineno, argument.col_offset)] = "p"
    return roles


def _arguments(args: ast.arguments) -> Iterator[ast.arg]:
    yield from (*args.posonlyargs, *args.args, *args.kwonlyargs)
    yield from (a for a in (args.vararg, args.kwarg) if a)


def _place(source: Source, line: int, column: int) -> tuple[int, int]:
    text = source.lines[line - 1]
    return line, column if text.isascii() else len(text.encode()[:column].decode(errors="ignore"))


@lru_cache(maxsize=32)
def _lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


def highlight_sample(code: str, language: str) -> str:
    r"""A fenced block of a note as HTML; a language nobody knows is shown plainly."""
    lexer = _lexer(language) if language else None
    if lexer is None:
        return html.escape(code, False)
    lines: list[tuple[str, str]] = [
        (_kind(token), value) for _, token, value in lexer.get_tokens_unprocessed(code)
    ]
    return _line(lines)
