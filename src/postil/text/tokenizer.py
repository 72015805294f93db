r"""What a tokenizer is: text to numbers and back.

A language model sees a text as a sequence of numbers below `vocab_size`. What a number stands for decides
what the model can say, how long a text is for it, and what its loss means: a loss per token of two tokenizers
cannot be compared, bits per character can.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from postil.text.reading import TextError, clean_text

__all__ = ["ByteStream", "TextStream", "Tokenizer", "Units", "fingerprint", "token_dtype"]

Ids = npt.NDArray[Any]

FORMAT = 1


class Units(NamedTuple):
    r"""How much text a run of tokens is: what turns nats per token into bits per character or byte."""

    tokens: int
    characters: int
    bytes: int

    # The loss of a text is the sum over its tokens, whatever the tokens are. Dividing that sum by the number
    # of characters gives a figure all tokenizers share.
    def bits_per_character(self, nats_per_token: float) -> float:
        r"""$\mathrm{nats} / \ln 2 \cdot \mathrm{tokens} / \mathrm{characters}$, in bits."""
        return nats_per_token / math.log(2) * self.tokens / self.characters

    def bits_per_byte(self, nats_per_token: float) -> float:
        r"""$\mathrm{nats} / \ln 2 \cdot \mathrm{tokens} / \mathrm{bytes}$, in bits."""
        return nats_per_token / math.log(2) * self.tokens / self.bytes


class TextStream(ABC):
    r"""Text that grows by one token at a time; all that was returned, joined, equals decoding at once."""

    @abstractmethod
    def feed(self, token: int) -> str:
        r"""Take one token; return the text that is now certain, perhaps none."""

    def flush(self) -> str:
        r"""End the text: return what was held back, a half character as one replacement mark (U+FFFD)."""
        return ""


class Tokenizer(ABC):
    r"""Text to token numbers and back.

    `reads_bytes` says that `encode_stream` takes raw bytes where a corpus is read; otherwise it takes
    text by the reading rule.
    """

    kind: ClassVar[str]
    reads_bytes: ClassVar[bool] = False
    vocab_size: int

    @abstractmethod
    def encode_stream(self, chunks: Iterable[Any]) -> Iterator[Ids]:
        r"""Encode a text that arrives in chunks; the numbers do not depend on where the chunks are cut.

        Cost: memory of one chunk.

        Raises:
            TextError: a symbol is not in the vocabulary.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int] | Ids) -> str:
        r"""Turn token numbers into text.

        Raises:
            TextError: a number is not below `vocab_size`.
        """

    @abstractmethod
    def stream(self) -> TextStream:
        r"""Start a text that is decoded one token at a time."""

    @abstractmethod
    def symbol(self, token: int) -> str:
        r"""Name one token for people: printable, whatever it stands for."""

    @abstractmethod
    def measure(self, chunks: Iterable[Ids]) -> Units:
        r"""Count the tokens given, and the characters and bytes of text they stand for."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        r"""Describe the tokenizer in JSON's terms; `tokenizer_from_dict` builds it again."""

    def encode(self, text: str) -> Ids:
        r"""Encode one text, read by the reading rule.

        Raises:
            TextError: a symbol is not in the vocabulary.
        """
        parts = list(self.encode_stream([clean_text(text)]))
        return np.concatenate(parts) if parts else np.empty(0, token_dtype(self.vocab_size))


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    r"""Return the smallest unsigned type that holds every token number, little-endian."""
    return np.dtype("<u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def fingerprint(tokenizer: Tokenizer) -> str:
    r"""SHA-256 of the tokenizer's description: equal exactly when two tokenizers give the same numbers."""
    canonical = json.dumps(tokenizer.to_dict(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def checked_ids(ids: Iterable[int] | Ids, vocab_size: int) -> Ids:
    r"""Return token numbers as an array, all of them in range."""
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64).reshape(-1)
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < vocab_size:
        wrong = array[(array < 0) | (array >= vocab_size)][0]
        raise TextError(f"token {wrong} does not exist: this tokenizer has {vocab_size}, counted from 0")
    return array


# A token of bytes may end inside a character. The incremental decoder holds the beginning of a character back
# until the rest arrives, and so agrees with decoding everything at once.
class ByteStream(TextStream):
    r"""Text from tokens that stand for bytes."""

    def __init__(self, table: list[bytes]):
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        r"""Return the characters that this token completes."""
        checked_ids([token], len(self._table))
        return self._decoder.decode(self._table[token])

    def flush(self) -> str:
        r"""Return one replacement mark if the text ended inside a character."""
        return self._decoder.decode(b"", final=True)


# Every character of UTF-8 has exactly one byte that is not of the form 10xxxxxx: its first. So characters can
# be counted token by token, even where a token holds a part of one. In bytes that are no UTF-8 the same rule
# counts what would begin a character.
def byte_units(chunks: Iterable[Ids], table: list[bytes]) -> Units:
    r"""Count tokens that stand for bytes, their bytes, and the characters that begin in them."""
    starts = [sum(byte & 0xC0 != 0x80 for byte in token) for token in table]
    return sum_units(chunks, np.array(starts), np.array([len(token) for token in table]))


def half_pair(text: str, position: int) -> TextError:
    r"""Say that half a surrogate pair, which a broken terminal or program can send, is not text."""
    return TextError(
        f"half a surrogate pair (U+{ord(text[position]):04X}) at position {position} is not text"
    )


# Every tokenizer whose tokens are plain runs of text adds its counts up the same way.
def sum_units(chunks: Iterable[Ids], characters: Ids, sizes: Ids) -> Units:
    r"""Count tokens of known `characters` and `sizes` in bytes."""
    counts = np.zeros(len(sizes), np.int64)
    for chunk in chunks:
        counts += np.bincount(checked_ids(chunk, len(sizes)), minlength=len(sizes))
    return Units(int(counts.sum()), int(counts @ characters), int(counts @ sizes))
