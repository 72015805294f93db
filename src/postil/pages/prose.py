r"""Prose: Markdown to HTML and to messages for translators, from the same tokens.

Raw HTML is text here, links go only where a reader expects, and formulas are MathML before the page is
written. Whoever uses this module hands in a `Context`: where links lead, what a block says in the page's
language, and where faults are reported.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import quote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from mdit_py_plugins.amsmath import amsmath_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin

from postil.pages.mathematics import MathError, set_formula
from postil.pages.notes import Note

__all__ = ["Context", "Reference", "inline_html", "inline_text", "messages", "plain_text", "render", "slug"]


@dataclass(frozen=True)
class Reference:
    r"""Something a note may point at by a key in brackets: a paper."""

    href: str
    title: str
    label: str


@dataclass
class Context:
    r"""Everything a note needs to know about the page it stands on.

    `translate` gives a block in the page's language, or None; `resolve` the address of a name in code font,
    or None; `address` the address of a relative link or None if it leads nowhere; `picture` the HTML of a
    picture from its file and description, or an error; `anchor` a free id for a heading; `fault` takes a
    line and a message; `highlight` renders a fenced block; `terms` marks symbols in MathML; `example` gives
    what running the page's example drew.
    """

    translate: Callable[[str], str | None] = lambda message: message
    resolve: Callable[[str], str | None] = lambda name: None
    address: Callable[[str], str | None] = lambda target: target
    picture: Callable[[str, str], str] = lambda source, label: html.escape(label)
    anchor: Callable[[str], str] = lambda text: slug(text)
    fault: Callable[[int, str], None] = lambda line, message: None
    warn: Callable[[int, str], None] = lambda line, message: None
    highlight: Callable[[str, str], str] = lambda code, language: html.escape(code)
    terms: Callable[[str], str] = lambda mathml: mathml
    example: Callable[[], str] = lambda: ""
    references: dict[str, Reference] = field(default_factory=dict)
    strict: bool = False
    heading: int = 2
    untranslated: int = 0
    line: int = 0


_SCHEMES = ("http", "https", "mailto")
_HIDDEN = re.compile(r"[\x00-\x20\x7f-\x9f\u200b-\u200f\u2028-\u202e]")


# A browser drops tabs and line ends inside an address before it looks at the scheme, so "java<tab>script:" is
# "javascript:" to it. What is not plainly an allowed scheme or a relative address stays text.
def is_safe_link(url: str) -> bool:
    r"""True for http, https, mailto, relative and `#` links."""
    cleaned = _HIDDEN.sub("", html.unescape(url))
    try:
        parts = urlsplit(cleaned)
    except ValueError:
        return False
    if parts.scheme:
        return parts.scheme.lower() in _SCHEMES and not cleaned.lower().startswith(("http:///", "https:///"))
    return not cleaned.startswith(("//", "\\", "/\\")) and ":" not in cleaned.split("/")[0].split("#")[0]


_FORMULAS = {
    "math_inline": False,
    "math_inline_double": True,
    "math_block": True,
    "math_block_label": True,
    "amsmath": True,
}


# A dollar sign opens no formula where a digit follows the closing one ("$5 and $6"), or where a space follows
# it.
def _parser() -> MarkdownIt:
    md = MarkdownIt("commonmark", {"html": False, "maxNesting": 60}, renderer_cls=_Renderer)
    md.enable(["table", "strikethrough"]).disable(["entity"])
    md.use(dollarmath_plugin, allow_space=False, allow_digits=False, double_inline=False)
    md.use(amsmath_plugin)
    # The plugins bring renderers of their own; formulas are ours.
    for name, display in _FORMULAS.items():
        md.add_render_rule(name, _Renderer.block_formula if display else _Renderer.inline_formula)
    md.validateLink = is_safe_link  # pyright: ignore[reportAttributeAccessIssue]
    return md


def slug(text: str) -> str:
    r"""The id of a heading: its words in lower case, joined by hyphens, as readers of READMEs expect."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", text.lower()).strip()) or "section"


def render(note: Note, context: Context) -> str:
    r"""Render Markdown as HTML.

    A block whose translation is missing or outdated shows the original, marked as English.
    """
    env: dict[str, Any] = {"context": context, "line": note.line, "references": _references(context)}
    tokens = _parse(note, env)
    for i, token in enumerate(tokens):
        token.meta = {**token.meta, "line": note.line + (token.map[0] if token.map else 0)}
        if token.type == "inline":
            _translate(tokens, i, env)
            linked = False
            for child in token.children or []:
                linked = (linked or child.type == "link_open") and child.type != "link_close"
                child.meta = {**child.meta, "line": token.meta["line"], "linked": linked}
    # A paragraph that held only a figure which is not there yet is gone with it.
    return PARSER.renderer.render(tokens, PARSER.options, env).replace("<p></p>\n", "").strip()


# The parser of environments looks for each one's end through the rest of the note: fine for a few, and not
# for the thousands that only a hostile note has. Those are shown as they were typed.
_ENVIRONMENTS = 100


def _parse(note: Note, env: dict[str, Any]) -> list[Token]:
    many = note.text.count("\\begin{") > _ENVIRONMENTS
    return (_WITHOUT_ENVIRONMENTS if many else PARSER).parse(note.text, env)


def _references(context: Context) -> dict[str, dict[str, str]]:
    return {
        key.upper(): {"href": reference.href, "title": f"{reference.title}"}
        for key, reference in context.references.items()
    }


def _translate(tokens: list[Token], i: int, env: dict[str, Any]) -> None:
    context: Context = env["context"]
    message = _message(tokens[i])
    if not message:
        return
    translated = context.translate(message)
    if translated is None:
        context.untranslated += 1
        _block_of(tokens, i).attrs.update({"lang": "en", "class": "untranslated"})
    elif translated != message:
        parsed = PARSER.parseInline(translated, env)
        tokens[i].children = parsed[0].children if parsed else []


# In a tight list the paragraph is not drawn; the item carries the mark instead.
def _block_of(tokens: list[Token], i: int) -> Token:
    return tokens[i - 2] if tokens[i - 1].hidden and i > 1 else tokens[i - 1]


def _message(token: Token) -> str:
    r"""The text of a block as a message, or nothing where it holds no words."""
    words = "".join(c.content for c in _flat(token.children or []) if c.type == "text")
    return " ".join(token.content.split()) if re.search(r"[^\W\d_]{2}", words) else ""


def _flat(tokens: Sequence[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from _flat(token.children or [])


def messages(note: Note) -> Iterator[tuple[str, int]]:
    r"""Every block a translator is asked for: paragraph, heading, list item, table cell; with its line."""
    for token in _parse(note, {}):
        if token.type == "inline" and (message := _message(token)):
            yield message, note.line + (token.map[0] if token.map else 0)


def plain_text(note: Note, translate: Callable[[str], str | None]) -> str:
    r"""The words of a note, for the search index and for descriptions."""
    found = []
    for token in _parse(note, {}):
        if token.type == "inline":
            message = _message(token)
            inline = PARSER.parseInline((message and translate(message)) or token.content, {})
            found.append(
                "".join(c.content or " " * (c.type == "softbreak") for c in inline[0].children or [])
            )
        elif token.type in ("fence", "code_block"):
            found.append(token.content)
    return " ".join(" ".join(found).split())


def inline_html(text: str) -> str:
    r"""One line of Markdown, such as a title: code and formulas are set, links are only words."""
    tokens = [
        token for token in PARSER.parseInline(text, {})[0].children or [] if not token.type.startswith("link")
    ]
    return cast(_Renderer, PARSER.renderer).renderInline(
        tokens, PARSER.options, {"context": Context(), "line": 1}
    )


def inline_text(text: str) -> str:
    r"""The words of one line of Markdown."""
    return plain_text(Note(text, 1), lambda message: None) if text else ""


class _Renderer(RendererHTML):
    r"""HTML from tokens; each method renders one kind of token."""

    def code_inline(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        token = tokens[idx]
        code = f'<code translate="no">{html.escape(token.content)}</code>'
        target = None if token.meta.get("linked") else env["context"].resolve(token.content)
        return f'<a href="{html.escape(target)}">{code}</a>' if target else code

    def inline_formula(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        return _formula(tokens[idx], False, env)[0]

    def block_formula(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        mathml, tag = _formula(tokens[idx], True, env)
        if not tag:
            return f'<div class="formula">{mathml}</div>\n'
        anchor = html.escape(env["context"].anchor(slug(f"eq {tag}")))
        label = html.escape(tag)
        link = f'<a class="tag" href="#{anchor}">({label})</a>'
        return f'<div class="formula" id="{anchor}">{mathml}{link}</div>\n'

    def heading_open(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        context: Context = env["context"]
        token = tokens[idx]
        anchor = context.anchor(slug(tokens[idx + 1].content))
        level = min(context.heading + max(int(token.tag[1]) - 2, 0), 6)
        lang = ' lang="en" class="untranslated"' if "lang" in token.attrs else ""
        token.tag = tokens[idx + 2].tag = f"h{level}"
        return f'<h{level} id="{html.escape(anchor)}"{lang}>'

    def link_open(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        context: Context = env["context"]
        token = tokens[idx]
        href = str(token.attrs.get("href", ""))
        for reference in context.references.values():
            if href == reference.href and tokens[idx + 1].content in context.references:
                tokens[idx + 1].content = reference.label
        address = href
        if not urlsplit(href).scheme:
            context.line = int(token.meta.get("line", env["line"]))
            address = context.address(href)
            if address is None:
                # In a project that was not written for this publisher, brackets may mean anything.
                message = f"a link to {href!r} leads nowhere"
                (context.fault if context.strict else context.warn)(context.line, message)
                return "<a>"
        title = f' title="{html.escape(str(token.attrs["title"]))}"' if token.attrs.get("title") else ""
        return f'<a href="{html.escape(address)}"{title}>'

    # No page asks another machine for anything, so a picture from elsewhere is a link to it.
    def image(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        context: Context = env["context"]
        token = tokens[idx]
        source, text = str(token.attrs.get("src", "")), html.escape(token.content)
        if urlsplit(source).scheme:
            return f'<a href="{html.escape(source)}">{text or html.escape(source)}</a>'
        line = token.meta.get("line", env["line"])
        try:
            drawn = context.picture(source, token.content)
        except (OSError, ValueError) as error:
            context.fault(line, f"the picture {source!r}: {error}")
            return text
        if not drawn:
            context.warn(line, f"no figure, as {source!r} is not there yet")
        return drawn

    def fence(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        token = tokens[idx]
        language, *rest = token.info.split() or [""]
        code = env["context"].highlight(token.content.rstrip("\n"), language)
        drawn = env["context"].example() if "example" in rest else ""
        return f'<pre class="sample" lang="en" translate="no">{code}</pre>{drawn}\n'

    def code_block(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        text = html.escape(tokens[idx].content.rstrip("\n"))
        return f'<pre class="sample" lang="en" translate="no">{text}</pre>\n'

    def table_open(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        return '<div class="table"><table>\n'

    def table_close(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        return "</table></div>\n"

    # Alignment comes as a style attribute, which the content security policy forbids.
    def td_open(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        token = tokens[idx]
        align = re.search(r"text-align:(\w+)", str(token.attrs.pop("style", "")))
        if align:
            token.attrs["class"] = f"{token.attrs.get('class', '')} {align[1]}".strip()
        return f"<{token.tag}{self.renderAttrs(token)}>"

    th_open = td_open


# A formula that cannot be set is shown as typed, and reported with its line: a reader sees what was meant,
# and the build does not pass over it.
def _formula(token: Token, display: bool, env: dict[str, Any]) -> tuple[str, str]:
    context: Context = env["context"]
    try:
        formula = set_formula(token.content, display)
        return context.terms(formula.mathml), formula.tag
    except MathError as error:
        context.fault(token.meta.get("line", env["line"]), f"mathematics: {error}")
        return f'<code class="bad" translate="no">{html.escape(token.content)}</code>', ""


def path_of(target: str) -> str:
    r"""Percent-encode a path for an address."""
    return quote(target, safe="/.~-_()@!,")


PARSER = _parser()
_WITHOUT_ENVIRONMENTS = _parser().disable("amsmath")
