r"""Writing: a page's notes and code as HTML, in one language.

The introduction stands across the page; below it every row is a pair (`rows`). Formulas and code are linked
here: a term of the front matter gives a symbol and the names that stand for it one class, and the style
sheet lights them up together, without a script.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from postil.pages import interface, prose, rows
from postil.pages.anchors import Anchors
from postil.pages.catalogue import Catalogue
from postil.pages.figures import plots_html
from postil.pages.highlight import code_lines, highlight_sample
from postil.pages.mathematics import MathError, set_formula
from postil.pages.prose import Context
from postil.pages.reading import Fault, Page
from postil.pages.tracing import Trace

__all__ = ["TEMPLATES", "Surroundings", "Written", "write_page"]

TEMPLATES = Environment(
    loader=PackageLoader("postil.pages", "assets"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["urlpath"] = prose.path_of
TEMPLATES.filters["inline"] = lambda text: Markup(prose.inline_html(text))
TEMPLATES.filters["words"] = prose.inline_text


@dataclass
class Surroundings:
    r"""What a page needs to know about the others: addresses of names, links and pictures, old anchors."""

    resolve: Callable[[str], str | None]
    address: Callable[[str], str | None]
    picture: Callable[[str, str], str]
    lost: dict[str, str] = field(default_factory=dict)
    trace: Trace | None = None


@dataclass
class Written:
    r"""The body of a page and what was found while writing it."""

    intro: Markup
    rows: Markup
    contents: list[rows.Entry]
    faults: list[Fault]
    anchors: Anchors
    blocks: int
    untranslated: int


@dataclass(frozen=True)
class Term:
    r"""A symbol of the page's formulas, as MathML, and the names that stand for it in the code."""

    number: int
    symbol: str
    names: tuple[str, ...]


def write_page(
    page: Page, language: str, catalogue: Catalogue | None, around: Surroundings, context: Context
) -> Written:
    r"""Write the introduction and the rows of a page.

    `context` brings what is the same on every page of the site (papers); the rest is filled in here.
    """
    anchors, faults = Anchors(), list[Fault]()
    for anchor in (*page.anchors(), *around.lost):
        anchors.take(anchor)
    path = page.source.path if page.source else page.module.path
    terms = _terms(page, path, faults)
    words = interface.words(language)

    def fault(line: int, message: str) -> None:
        faults.append(Fault(path, line, message))

    def warn(line: int, message: str) -> None:
        faults.append(Fault(path, line, message, is_warning=True))

    # The caller keeps the context: a link notes there on which line it stands.
    context.translate = catalogue.translate if catalogue else lambda message: message
    context.resolve, context.address, context.picture = around.resolve, around.address, around.picture
    context.anchor, context.fault, context.warn = anchors.take, fault, warn
    context.highlight = highlight_sample
    context.terms = partial(_mark, terms=terms)
    context.example = lambda: plots_html(around.trace.plots if around.trace else {}, context.translate)
    names = {name.rpartition(".")[2]: f"t{term.number}" for term in terms for name in term.names}
    code = code_lines(page.source, names) if page.source else []
    shapes = around.trace.shapes if around.trace else {}
    writer = rows.Writer(page, context, words, code, shapes, around.lost)
    intro = "".join(writer.section(section) for section in page.intro)
    contents = rows.titles(intro, 2)
    body = writer.rows(_legend(terms, words), contents)
    return Written(
        Markup(intro), Markup(body), contents, faults, anchors, len(page.messages()), context.untranslated
    )


def _terms(page: Page, path: str, faults: list[Fault]) -> list[Term]:
    found = []
    for number, (symbol, names) in enumerate(page.front.terms, 1):
        try:
            mathml = set_formula(symbol, False).mathml
        except MathError as error:
            faults.append(Fault(path, 1, f"term {symbol!r}: {error}"))
            continue
        found.append(Term(number, re.sub(r"^<math[^>]*>|</math>$", "", mathml), names))
    return found


# A symbol is found in a formula as the same MathML it has when set alone. Longer symbols are marked first,
# and what is inside a marked one is changed so that it no longer matches: the $W$ of $W_Q$ is not the term
# $W$.
def _mark(mathml: str, terms: list[Term]) -> str:
    head, start, rest = mathml.partition(">")
    for term in sorted(terms, key=lambda term: -len(term.symbol)):
        rest = rest.replace(term.symbol, _marked(term))
    return head + start + rest.replace("<mi >", "<mi>")


def _marked(term: Term) -> str:
    return re.sub(r"^<(\w+)", rf'<\1 class="t{term.number}"', term.symbol).replace("<mi>", "<mi >")


def _legend(terms: list[Term], words: dict[str, str]) -> str:
    if not terms:
        return ""
    entries = [(term.number, Markup(f"<math>{term.symbol}</math>"), term.names) for term in terms]
    return TEMPLATES.get_template("terms.html").render(terms=entries, label=words["symbols"])
