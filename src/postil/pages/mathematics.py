r"""Mathematics: TeX to MathML, once, when the site is built.

A browser draws MathML itself, a screen reader reads it, and copying works; no script runs and no line of the
page waits for one. The translation is `math-core`'s. What is left to do here: equation numbers, the few
places where its output needs a style attribute (which our content security policy forbids), and errors that
name the formula.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from functools import lru_cache

from math_core import LatexError, LatexToMathML

__all__ = ["Formula", "MathError", "set_formula"]

_CONVERTER = LatexToMathML(fancy_error=False)


class MathError(ValueError):
    r"""A formula that cannot be set; the message says why."""


@dataclass(frozen=True)
class Formula:
    r"""MathML of a formula, and the number it was tagged with (or none)."""

    mathml: str
    tag: str


# A tag belongs to the page, not to the formula: the number stands at the right edge and is a link target.
# Environments are set unnumbered for the same reason, or the page would have two counts.
_TAG = re.compile(r"\\tag\*?\{([^{}]*)\}")
_NUMBERED = re.compile(r"\\(begin|end)\{(align|gather|equation|multline|alignat|flalign|eqnarray)\}")


@lru_cache(maxsize=4096)
def set_formula(tex: str, display: bool) -> Formula:
    r"""Translate one formula.

    Raises:
        MathError: the formula is empty, or is not TeX that `math-core` knows.
    """
    tags = _TAG.findall(tex)
    plain = _NUMBERED.sub(r"\\\1{\2*}", _TAG.sub("", tex)).strip()
    if not plain:
        raise MathError("an empty formula")
    if len(tags) > 1:
        raise MathError("more than one \\tag: give each equation its own $$...$$")
    try:
        mathml = _CONVERTER.convert_with_local_state(plain, displaystyle=display)
    except LatexError as error:
        raise MathError(f"{_reason(error)} in ${tex.strip()}$") from None
    # The `alttext` is what copying gives back, and what a reader without MathML gets.
    alternative = html.escape(" ".join(plain.split()))
    mathml = mathml.replace("<math", f'<math alttext="{alternative}"', 1)
    return Formula(_without_styles(_prime(mathml)), tags[0] if tags else "")


def _reason(error: LatexError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else "not valid TeX").rstrip(".")


# Colours become attributes; what only aligns the columns of a table becomes a class of the style sheet.
_STYLE = re.compile(r' style="([^"]*)"')


def _without_styles(mathml: str) -> str:
    def replace(match: re.Match[str]) -> str:
        rules = dict(rule.split(":", 1) for rule in match[1].split(";") if ":" in rule)
        rules = {name.strip(): value.strip() for name, value in rules.items()}
        found = [f' mathcolor="{rules["color"]}"'] if re.fullmatch(r"#\w+", rules.get("color", "")) else []
        align = rules.get("text-align", "")
        found += [f' class="{align}"'] if align in ("left", "right", "center") else []
        return "".join(found)

    return _STYLE.sub(replace, mathml)


# A prime is already raised and small in the font; as a superscript it would be raised and made small again.
_PRIME = re.compile(r"<msup>((?:<m[ion]>[^<]*</m[ion]>))<mo>([′″‴]+)</mo></msup>")


def _prime(mathml: str) -> str:
    return _PRIME.sub(r'<mrow>\1<mo class="prime" lspace="0" rspace="0">\2</mo></mrow>', mathml)
