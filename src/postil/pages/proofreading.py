r"""Proofreading: what a machine can find wrong in a translation.

A good translation cannot be told by rules, but many bad ones can: an identifier that got lost, a formula
that changed, *dropout* rendered as leaving school. The glossary names for each term the renderings that are
wrong; a rule applies where the English block uses the term.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from postil.pages.catalogue import po_file, read_catalog
from postil.pages.project import Project
from postil.pages.prose import PARSER
from postil.pages.reading import Fault, Page

__all__ = ["Glossary", "proofread", "read_glossary", "stale"]


@dataclass(frozen=True)
class Term:
    r"""A term, and what it must not become."""

    english: re.Pattern[str]
    name: str
    forbidden: re.Pattern[str]


@dataclass(frozen=True)
class Glossary:
    r"""The rules for one language, and words that stay English in it."""

    terms: tuple[Term, ...]
    kept: frozenset[str]


# `head (attention)` is the term `head`, `numerator / denominator` two of them. An English term is met in the
# plural and with any capital.
def read_glossary(file: Path, language: str) -> Glossary:
    r"""Read the rules for a language from a table; a missing file has none.

    The columns are `en`, the language tags, `stays_english`, and `forbidden_<language>_regex`, whose
    alternatives are parted by semicolons.
    """
    if not file.is_file():
        return Glossary((), frozenset())
    column = f"forbidden_{language.split('_')[0]}_regex"
    terms, kept = [], set()
    with file.open(encoding="utf-8-sig", newline="") as table:
        for entry in csv.DictReader(table):
            names = [n.strip() for n in re.sub(r"\([^)]*\)", "", entry["en"]).split(" / ") if n.strip()]
            if entry.get("stays_english") in ("yes", "part"):
                kept.update(name.casefold() for name in names)
            rules = [rule for rule in (entry.get(column) or "").split(";") if rule]
            if rules:
                english = "|".join(re.escape(name) for name in names)
                pattern = re.compile(rf"(?<![\w-])(?:{english})(?:s|es)?(?![\w-])", re.IGNORECASE)
                terms.append(Term(pattern, names[0], re.compile("|".join(f"(?:{rule})" for rule in rules))))
    return Glossary(tuple(terms), frozenset(kept))


def stale(project: Project, page: Page, language: str) -> Iterator[Fault]:
    r"""Blocks of a page that a language says in an old form, or not at all."""
    file = po_file(project.locale, language, page.module.name)
    catalog = read_catalog(file, language)
    shown = _shown(file, project)
    known = {str(m.id): m for m in catalog or () if m.id}
    for message in dict.fromkeys(text for text, _ in page.messages()):
        entry = known.get(message)
        if entry is None or not entry.string:
            yield Fault(shown, entry.lineno or 1 if entry else 1, f"not translated: {_cut(message)}")
        elif entry.fuzzy:
            yield Fault(shown, entry.lineno or 1, f"outdated, its English has changed: {_cut(message)}")


def proofread(project: Project, page: Page, language: str, glossary: Glossary) -> Iterator[Fault]:
    r"""Faults in the current translations of a page."""
    file = po_file(project.locale, language, page.module.name)
    shown = _shown(file, project)
    for message in read_catalog(file, language) or ():
        if message.id and message.string and not message.fuzzy:
            for fault in faults_of(str(message.id), str(message.string), language, glossary):
                yield Fault(shown, message.lineno or 1, f"{fault}: {_cut(str(message.string))}")


def _shown(file: Path, project: Project) -> str:
    return file.relative_to(project.home).as_posix() if file.is_relative_to(project.home) else str(file)


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def faults_of(english: str, translated: str, language: str, glossary: Glossary) -> Iterator[str]:
    r"""What is wrong with one translated block, in words."""
    before, after = _pieces(english), _pieces(translated)
    for kind in ("code", "formula", "link"):
        lost, added = before[kind] - after[kind], after[kind] - before[kind]
        if lost:
            yield f"{kind} missing: {', '.join(sorted(lost))}"
        if added:
            yield f"{kind} not in the English: {', '.join(sorted(added))}"
    plain_english, plain = _plain(english), _plain(translated)
    for term in glossary.terms:
        found = term.forbidden.search(plain) if term.english.search(plain_english) else None
        if found:
            yield f"{found[0]!r} is a wrong rendering of {term.name!r}"
    if english == translated and _has_words(plain_english, glossary):
        yield "equals the English"
        return
    if language.split("_")[0] in ("zh", "ja"):
        yield from _punctuation(plain_english, plain)


def _pieces(text: str) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {"code": Counter(), "formula": Counter(), "link": Counter()}
    for token in PARSER.parseInline(text, {})[0].children or []:
        if token.type == "code_inline":
            found["code"][f"`{token.content}`"] += 1
        elif token.type.startswith("math_inline"):
            found["formula"][f"${token.content}$"] += 1
        elif token.type == "link_open":
            found["link"][str(token.attrs.get("href"))] += 1
    # A citation is a link only where its paper is known; as a key in brackets it counts everywhere.
    found["link"].update(re.findall(r"(?<!\])\[([a-z]+\d{4}\w*)\](?![(\[])", text))
    return found


# An identifier or formula stands as one placeholder character, so that rules about neighbours see something.
_OBJECT = "\ufffc"


def _plain(text: str) -> str:
    text = re.sub(r"(`+)(?:(?!\1).)+\1|\$\$?[^$]+\$\$?|\[[a-z]+\d{4}\w*\]", _OBJECT, text)
    text = re.sub(r"!?\[", "", re.sub(r"\]\([^)\s]*\)", "", text))
    return re.sub(r"[*_]{1,3}(?=\S)|(?<=\S)[*_]{1,3}", "", text)


def _has_words(text: str, glossary: Glossary) -> bool:
    for name in sorted(glossary.kept, key=len, reverse=True):
        text = re.sub(rf"\b{re.escape(name)}\b", "", text, flags=re.IGNORECASE)
    return bool(re.search(r"\b[a-z]{3,}\b", text))


_CJK = r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff々〆]"
_STOPS = "。、，；：！？）」』】"


def _punctuation(english: str, text: str) -> Iterator[str]:
    if re.search(rf"\s[{_STOPS}]|[（「『【]\s|^[{_STOPS}]", text):
        yield "punctuation torn off by a space"
    if re.search(r"[.?!]$", english.strip()) and re.search(rf"(?:{_CJK}|{_OBJECT}|\w)$", text.strip()):
        yield "the closing punctuation is missing"
    if re.search(rf"[。！？]\s*[{_OBJECT}\w]+\s*$", text) and not re.search(rf"[{_OBJECT}\w]\s*$", english):
        yield "an identifier follows the closing punctuation"
    if re.search(rf"{_CJK}[,;:!?()]|[,;:!?]{_CJK}|\({_CJK}|{_CJK}\.(?:\s|$|{_CJK})", text):
        yield "half-width punctuation beside full-width text"
    if re.search(r"[\uff10-\uff19\uff21-\uff3a\uff41-\uff5a\uff61-\uff9f]", text):
        yield "full-width letters or digits, or half-width katakana"
    if _brackets_differ(text):
        yield "a bracket opens full-width and closes half-width, or the reverse"


def _brackets_differ(text: str) -> bool:
    open_brackets = []
    for character in text:
        if character in "（(":
            open_brackets.append(character)
        elif character in "）)" and open_brackets and open_brackets.pop() + character not in ("（）", "()"):
            return True
    return False
