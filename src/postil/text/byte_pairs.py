r"""Byte-pair encoding.

Begin with the 256 bytes. Find the pair of neighbours that is most common in the training text, make it a new
token, and repeat until the vocabulary is full. Common words end up as one token, rare ones as several, and
since the bytes stay in the vocabulary no text is ever unknown.

The training and the encoding are done by the `tokenizers` package. What is kept is only the list of merges,
so that a vocabulary stored in a run is data that can be checked, and decoding needs no package at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from postil.text.reading import TextError, pieces
from postil.text.tokenizer import (
    FORMAT,
    ByteStream,
    Ids,
    TextStream,
    Tokenizer,
    Units,
    byte_units,
    checked_ids,
    half_pair,
    token_dtype,
)

__all__ = ["BytePairs"]


# The package writes bytes as printable characters: those that print stand for themselves, the rest are moved
# up past U+0100 in order.
def _byte_alphabet() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]


_ALPHABET = _byte_alphabet()
LONGEST = 256
"""Bytes of the longest token."""


class BytePairs(Tokenizer):
    r"""Tokens 0 to 255 are the bytes; each merge makes the next token out of two earlier ones.

    Raises:
        TextError: a merge names a token that does not exist yet, or the `tokenizers` package is missing.
    """

    kind = "bpe"

    def __init__(self, merges: list[tuple[int, int]]):
        self.merges = merges
        self._table = _grow(merges)
        self.vocab_size = len(self._table)
        spelled = ["".join(_ALPHABET[byte] for byte in token) for token in self._table]
        vocabulary = {spelling: number for number, spelling in enumerate(spelled)}
        pairs = [(spelled[left], spelled[right]) for left, right in merges]
        self._model = _model(vocab=vocabulary, merges=pairs)

    @classmethod
    def of(cls, chunks: Iterable[str], vocab_size: int = 4096) -> BytePairs:
        r"""Learn the merges of a text; a short one may hold fewer than `vocab_size` asks for.

        Raises:
            TextError: `vocab_size` has no room for the 256 bytes, or the package is missing.
        """
        if vocab_size < 256:
            raise TextError(f"vocab_size={vocab_size}: byte pairs need at least 256, one token for each byte")
        learner = _model()
        trainer = _package().trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=sorted(_ALPHABET),
            max_token_length=LONGEST,
            show_progress=False,
        )
        learner.train_from_iterator(pieces(chunks), trainer)
        spelled = json.loads(learner.to_str())["model"]["merges"]
        numbers = {character: byte for byte, character in enumerate(_ALPHABET)}
        merges: list[tuple[int, int]] = []
        for left, right in spelled:
            merges.append((numbers[left], numbers[right]))
            numbers.setdefault(left + right, len(numbers))
        return cls(merges)

    def encode_stream(self, chunks: Iterable[str]) -> Iterator[Ids]:
        r"""Encode piece by piece; no token continues from one piece into the next."""
        dtype = token_dtype(self.vocab_size)
        for piece in pieces(chunks):
            yield np.array(self._model.encode(piece).ids, dtype)

    def encode(self, text: str) -> Ids:
        r"""Encode one text, read by the reading rule.

        Raises:
            TextError: it holds half a surrogate pair, which is not text.
        """
        if half := re.search("[\ud800-\udfff]", text):
            raise half_pair(text, half.start())
        return super().encode(text)

    def decode(self, ids: Iterable[int] | Ids) -> str:
        r"""Join the bytes and read them as UTF-8; each ill-formed run becomes one replacement mark."""
        numbers = checked_ids(ids, self.vocab_size).tolist()
        return b"".join(map(self._table.__getitem__, numbers)).decode("utf-8", "replace")

    def stream(self) -> TextStream:
        r"""A character comes out with its last byte."""
        return ByteStream(self._table)

    def symbol(self, token: int) -> str:
        r"""Quote the bytes."""
        return repr(self._table[token])[1:]

    def measure(self, chunks: Iterable[Ids]) -> Units:
        r"""Count the bytes and characters of the tokens."""
        return byte_units(chunks, self._table)

    def to_dict(self) -> dict[str, Any]:
        r"""Return the merges as pairs of token numbers, in the order in which they apply."""
        return {"format": FORMAT, "kind": self.kind, "merges": [list(pair) for pair in self.merges]}


# Two merges can spell the same bytes, "a" with "bc" and "ab" with "c". Both stay, since both apply, but they
# make one token. The cap keeps a hostile list from doubling a token sixty times.
def _grow(merges: list[tuple[int, int]]) -> list[bytes]:
    table = [bytes([byte]) for byte in range(256)]
    known = set(table)
    for left, right in merges:
        if not (0 <= left < len(table) and 0 <= right < len(table)):
            raise TextError(f"the merge ({left}, {right}) names a token that does not exist before it")
        token = table[left] + table[right]
        if len(token) > LONGEST:
            raise TextError(
                f"the merge ({left}, {right}) makes a token of {len(token)} bytes; at most {LONGEST}"
            )
        if token not in known:
            known.add(token)
            table.append(token)
    return table


def _model(**parts: Any) -> Any:
    package = _package()
    model = package.Tokenizer(package.models.BPE(**parts))
    model.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return model


def _package() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise TextError('`--tokenizer bpe` needs the package tokenizers: pip install "postil[bpe]"') from None
    return tokenizers
