r"""Characters and bytes: the two alphabets that need no training.

Characters are the smallest thing a reader would call text; their number depends on the text. Bytes are always
256 and know every text, at the price of several tokens for most characters beyond ASCII.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from postil.text.reading import TextError
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
    sum_units,
    token_dtype,
)

__all__ = ["Bytes", "Characters"]


# Characters. Code points are small enough numbers that a table from each of them to its token replaces a
# dictionary, and a chunk is encoded in one indexing.
class Characters(Tokenizer):
    r"""One token for each character of an alphabet given in order.

    Raises:
        TextError: the alphabet is empty, repeats a character, or holds half a surrogate pair.
    """

    kind = "characters"

    def __init__(self, alphabet: str):
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise TextError("an alphabet needs at least one character, and each of them once")
        if any("\ud800" <= character <= "\udfff" for character in alphabet):
            raise TextError("half a surrogate pair is not a character: the alphabet cannot hold it")
        self.alphabet = alphabet
        self.vocab_size = len(alphabet)
        self._codes = _code_points(alphabet)
        table = np.full(0x110000, self.vocab_size, np.uint32)
        table[self._codes] = np.arange(self.vocab_size)
        self._table = table

    @classmethod
    def of(cls, chunks: Iterable[str]) -> Characters:
        r"""Take the alphabet of a text, in the order of code points."""
        return cls("".join(sorted(set().union(*map(set, chunks)))))

    def encode_stream(self, chunks: Iterable[str]) -> Iterator[Ids]:
        r"""Encode chunk by chunk; an unknown character is named with its place in the whole text."""
        dtype = token_dtype(self.vocab_size)
        for start, chunk in _slices(chunks):
            ids = self._table[_code_points(chunk)]
            if (unknown := np.flatnonzero(ids == self.vocab_size)).size:
                raise self._unknown(chunk[unknown[0]], start + int(unknown[0]))
            yield ids.astype(dtype)

    def decode(self, ids: Iterable[int] | Ids) -> str:
        r"""Join the characters."""
        return self._codes[checked_ids(ids, self.vocab_size)].tobytes().decode("utf-32-le")

    def stream(self) -> TextStream:
        r"""Every character is certain at once."""
        return _CharacterStream(self)

    def symbol(self, token: int) -> str:
        r"""Quote the character and give its code point."""
        return _named(self.alphabet[token])

    def measure(self, chunks: Iterable[Ids]) -> Units:
        r"""One character for each token."""
        sizes = np.array([len(character.encode()) for character in self.alphabet])
        return sum_units(chunks, np.ones(self.vocab_size, np.int64), sizes)

    def to_dict(self) -> dict[str, Any]:
        r"""Return the alphabet."""
        return {"format": FORMAT, "kind": self.kind, "alphabet": self.alphabet}

    def _unknown(self, character: str, position: int) -> TextError:
        allowed = repr(self.alphabet[:200]) + (" and more" if self.vocab_size > 200 else "")
        return TextError(
            f"the character {_named(character)} at position {position} (counted from 0) is not in the "
            f"vocabulary; allowed are these {self.vocab_size}: {allowed}"
        )


class _CharacterStream(TextStream):
    def __init__(self, tokenizer: Characters):
        self._tokenizer = tokenizer

    def feed(self, token: int) -> str:
        return self._tokenizer.decode([token])


class Bytes(Tokenizer):
    r"""One token for each byte, of any file whatever; a prompt is its UTF-8.

    The reading rule does not apply: a byte-order mark and CR are bytes like others, in training text,
    validation text and prompt alike.
    """

    kind = "bytes"
    reads_bytes = True
    vocab_size = 256

    def encode_stream(self, chunks: Iterable[bytes | str]) -> Iterator[Ids]:
        r"""Pass the bytes through; text is turned into its UTF-8."""
        for chunk in chunks:
            raw = _utf8(chunk) if isinstance(chunk, str) else chunk
            yield np.frombuffer(raw, np.uint8)

    def encode(self, text: str) -> Ids:
        r"""Return the UTF-8 of a text."""
        return np.frombuffer(_utf8(text), np.uint8)

    def decode(self, ids: Iterable[int] | Ids) -> str:
        r"""Read the bytes as UTF-8; each ill-formed run becomes one replacement mark (U+FFFD)."""
        return checked_ids(ids, 256).astype(np.uint8).tobytes().decode("utf-8", "replace")

    def stream(self) -> TextStream:
        r"""A character comes out with its last byte."""
        return ByteStream([bytes([byte]) for byte in range(256)])

    def symbol(self, token: int) -> str:
        r"""Write the byte in hexadecimal, with its ASCII character if it has one."""
        return f"0x{token:02x}" + (f" {chr(token)!r}" if 32 <= token < 127 else "")

    def measure(self, chunks: Iterable[Ids]) -> Units:
        r"""One byte for each token; characters as `byte_units` counts them."""
        return byte_units(chunks, [bytes([byte]) for byte in range(256)])

    def to_dict(self) -> dict[str, Any]:
        r"""Return the kind, which is all there is."""
        return {"format": FORMAT, "kind": self.kind}


# Bytes of a command line that are no UTF-8 arrive as surrogates; here they come out as they were.
def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise half_pair(text, error.start) from None


def _code_points(text: str) -> Ids:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _named(character: str) -> str:
    return f"{character!r} (U+{ord(character):04X})"


# One chunk may be a whole book given as one string; its table look-up should not need sixteen books of
# memory.
def _slices(chunks: Iterable[str], size: int = 1 << 20) -> Iterator[tuple[int, str]]:
    offset = 0
    for chunk in chunks:
        for start in range(0, len(chunk), size):
            part = chunk[start : start + size]
            yield offset, part
            offset += len(part)
