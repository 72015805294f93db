r"""Basic English words.

The simplest tokenizer whose tokens mean something: the text in lower case, cut into words, numbers, single
marks and line ends. Letter case and the number of blanks are lost; what comes back is spaced as English is
printed. For anything but a first look at word-level models, `bpe` loses nothing and knows every word.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any

import numpy as np

from postil.text.reading import TextError, pieces
from postil.text.tokenizer import (
    FORMAT,
    Ids,
    TextStream,
    Tokenizer,
    Units,
    checked_ids,
    sum_units,
    token_dtype,
)

__all__ = ["UNKNOWN", "Words"]

UNKNOWN = "<unk>"
_TOKEN = re.compile(r"\n|[^\W\d_]+(?:['’][^\W\d_]+)*|\d+|[^\w\s]|_")
_OPENING = frozenset("([{“‘\n")
_CLOSING = frozenset(".,;:!?)]}”’'%\n")


class Words(Tokenizer):
    r"""One token for each word of a list.

    If the list holds `<unk>`, every other word is that token; if not, every other word is an error.

    Raises:
        TextError: the list is empty, repeats a word, or holds something that is not one word or mark.
    """

    kind = "words"

    def __init__(self, words: list[str]):
        if not words or len(set(words)) != len(words):
            raise TextError("a list of words needs at least one word, and each of them once")
        for word in words:
            if word != UNKNOWN and _TOKEN.fullmatch(word) is None:
                raise TextError(f"{word!r} is not one word, one number or one mark in lower case")
        self.words = words
        self.vocab_size = len(words)
        self._index = {word: number for number, word in enumerate(words)}
        self._opening = np.array([word in _OPENING for word in words])
        self._closing = np.array([word in _CLOSING for word in words])

    # Ties are broken by the alphabet, so that the same text gives the same numbers everywhere.
    @classmethod
    def of(cls, chunks: Iterable[str], vocab_size: int | None = None) -> Words:
        r"""Make the list from a text: all its words, the most frequent one first.

        With `vocab_size` the list has no more entries than that. If the text has more words, the first entry
        is `<unk>`, and the most frequent words take the other places.

        Raises:
            TextError: `vocab_size` is below 2.
        """
        if vocab_size is not None and vocab_size < 2:
            raise TextError(f"vocab_size={vocab_size}: at least 2, one word and {UNKNOWN}")
        counts: Counter[str] = Counter()
        for piece in pieces(chunks):
            counts.update(_TOKEN.findall(piece.lower()))
        words = sorted(counts, key=lambda word: (-counts[word], word))
        if vocab_size is not None and len(words) > vocab_size:
            words = [UNKNOWN, *words[: vocab_size - 1]]
        return cls(words)

    def encode_stream(self, chunks: Iterable[str]) -> Iterator[Ids]:
        r"""Encode piece by piece; no word continues from one piece into the next."""
        dtype, unknown, position = token_dtype(self.vocab_size), self._index.get(UNKNOWN, -1), 0
        for piece in pieces(chunks):
            words = _TOKEN.findall(piece.lower())
            ids = np.array([self._index.get(word, unknown) for word in words], np.int64)
            if (missing := np.flatnonzero(ids < 0)).size:
                raise self._unknown(words[missing[0]], position + int(missing[0]))
            position += len(words)
            yield ids.astype(dtype)

    def decode(self, ids: Iterable[int] | Ids) -> str:
        r"""Join the words, spaced as English is printed."""
        numbers = checked_ids(ids, self.vocab_size)
        gaps = zip(self._blanks(numbers, after_opening=True).tolist(), numbers.tolist(), strict=True)
        return "".join(" " * blank + self.words[number] for blank, number in gaps)

    def stream(self) -> TextStream:
        r"""A word is certain at once; the blank before it depends on its left neighbour only."""
        return _WordStream(self)

    def symbol(self, token: int) -> str:
        r"""Quote the word."""
        return repr(self.words[token])

    # The blanks belong to no token, so they are counted where the decoded text would have them.
    def measure(self, chunks: Iterable[Ids]) -> Units:
        r"""Count the text as it is decoded, not as it was: lost blanks are not counted."""
        characters = np.array([len(word) for word in self.words])
        sizes = np.array([len(word.encode()) for word in self.words])
        total, blanks, after_opening = Units(0, 0, 0), 0, True
        for chunk in chunks:
            ids = checked_ids(chunk, self.vocab_size)
            part = sum_units([ids], characters, sizes)
            total = Units(*(old + new for old, new in zip(total, part, strict=True)))
            blanks += int(self._blanks(ids, after_opening).sum())
            after_opening = bool(self._opening[ids[-1]]) if ids.size else after_opening
        return Units(total.tokens, total.characters + blanks, total.bytes + blanks)

    def _blanks(self, ids: Ids, after_opening: bool) -> Ids:
        before = np.concatenate([[after_opening], self._opening[ids[:-1]]])[: len(ids)]
        return ~(before | self._closing[ids])

    def to_dict(self) -> dict[str, Any]:
        r"""Return the words in the order of their numbers."""
        return {"format": FORMAT, "kind": self.kind, "words": self.words}

    def _unknown(self, word: str, position: int) -> TextError:
        points = " ".join(f"U+{ord(character):04X}" for character in word[:20])
        alike = get_close_matches(word[:100], self.words, n=3)
        hint = f"; close to it are {', '.join(map(repr, alike))}" if alike else ""
        return TextError(
            f"the word {word[:100]!r} ({points}) at position {position} (words counted from 0) is not among "
            f"the {self.vocab_size} words of the vocabulary{hint}"
        )


class _WordStream(TextStream):
    def __init__(self, tokenizer: Words):
        self._tokenizer, self._last = tokenizer, "\n"

    def feed(self, token: int) -> str:
        checked_ids([token], self._tokenizer.vocab_size)
        word, last = self._tokenizer.words[token], self._last
        self._last = word
        return word if last in _OPENING or word in _CLOSING else " " + word
