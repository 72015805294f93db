r"""Token files: a text as numbers on disk.

A text is encoded once, chunk by chunk, and read in windows ever after, so a text far larger than memory costs
no more memory than a small one. Beside the numbers (`.bin`: plain unsigned integers, the smallest type that
holds the vocabulary) lies what they mean (`.json`): how many, of which text, by which tokenizer, and their
hash.

The name of a token file is computed from the text and the tokenizer, so the same text is never encoded twice,
and another text never answers in its place.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from postil.text.corpora import Corpus
from postil.text.reading import CHUNK, TextError
from postil.text.storage import atomic_file, cache_folder
from postil.text.tokenizer import Ids, Tokenizer, Units, fingerprint, token_dtype

__all__ = [
    "TokenFile",
    "Tokens",
    "count_tokens",
    "encode_corpus",
    "measure",
    "open_tokens",
    "split",
    "unseen_symbols",
    "write_tokens",
]

FORMAT = 1
_FIELDS = {"format": int, "dtype": str, "count": int, "tokenizer": str, "corpus": str, "sha256": str}


# A memory map of a file that another process cuts short kills its reader with a signal that cannot be caught.
# So rows are read, not mapped: a short read is an error like any other. The page cache makes both equally
# cheap, and a file opened for each batch is safe across threads and forks.
class TokenFile:
    r"""A checked token file; every reading makes sure that it is still the file that was checked."""

    def __init__(self, path: Path, dtype: np.dtype[Any], count: int, sha256: str):
        self.path, self.dtype, self.count, self.sha256 = path, dtype, count, sha256
        with self._open_as_is() as file:
            self._verify(file)

    # Size, time of change and identity cost one call. Only when they differ is the hash taken again: another
    # process may have rebuilt the same file, which is no reason to stop.
    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        r"""Open the file for reading.

        Raises:
            TextError: it is gone, or is no longer the file that was checked.
        """
        with self._open_as_is() as file:
            if _stamp(file) != self._stamp:
                self._verify(file)
            yield file

    def read(self, file: BinaryIO, start: int, count: int) -> Ids:
        r"""Read `count` tokens from `start` on.

        Raises:
            TextError: the file ends before them.
        """
        file.seek(start * self.dtype.itemsize)
        raw = file.read(count * self.dtype.itemsize)
        if len(raw) < count * self.dtype.itemsize:
            raise self._changed(f"it ends after token {start + len(raw) // self.dtype.itemsize}")
        return np.frombuffer(raw, self.dtype)

    @contextmanager
    def _open_as_is(self) -> Iterator[BinaryIO]:
        try:
            file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise TextError(f"cannot read the token file {str(self.path)!r}: {error.strerror}") from error
        with file:
            yield file  # pyright: ignore[reportReturnType]

    def _verify(self, file: BinaryIO) -> None:
        stamp, expected = _stamp(file), self.count * self.dtype.itemsize
        if stamp[0] != expected:
            raise self._changed(f"it has {stamp[0]} bytes instead of {expected}")
        digest = hashlib.sha256()
        file.seek(0)
        while chunk := file.read(CHUNK):
            digest.update(chunk)
        if digest.hexdigest() != self.sha256:
            raise self._changed(f"its SHA-256 is not {self.sha256}")
        self._stamp = stamp

    def _changed(self, how: str) -> TextError:
        return TextError(
            f"the token file {str(self.path)!r} is damaged or was changed: {how}. Start again to rebuild it"
        )


@dataclass(frozen=True)
class Tokens:
    r"""The tokens from `start` up to `stop` of a file: a text, or one part of a split."""

    file: TokenFile
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> Tokens:
        r"""Take a part: the tokens from `start` up to `stop`, counted from the first one of these.

        Raises:
            TextError: `stop` lies beyond the last token, or before `start`.
        """
        if not 0 <= start <= stop <= len(self):
            raise TextError(f"tokens {start} to {stop} do not exist: there are {len(self)}")
        return Tokens(self.file, self.start + start, self.start + stop)

    def rows(self, starts: Sequence[int] | Ids, length: int) -> Ids:
        r"""Read one row of `length` tokens from each start.

        Raises:
            TextError: a row leaves these tokens, or the file changed.
        """
        rows = np.empty((len(starts), length), self.file.dtype)
        with self.file.open() as file:
            for row, start in zip(rows, map(int, starts), strict=True):
                if not 0 <= start <= len(self) - length:
                    raise TextError(f"tokens {start} to {start + length} do not exist: there are {len(self)}")
                row[:] = self.file.read(file, self.start + start, length)
        return rows

    def chunks(self, size: int = CHUNK) -> Iterator[Ids]:
        r"""Read all tokens in order, `size` at a time."""
        with self.file.open() as file:
            for start in range(self.start, self.stop, size):
                yield self.file.read(file, start, min(size, self.stop - start))


def encode_corpus(corpus: Corpus, tokenizer: Tokenizer, *, folder: str | Path | None = None) -> Tokens:
    r"""Return the tokens of a text, from the file that holds them already or from a new one.

    `folder` is where token files are kept; by default a folder in the user's cache.

    Cost: one reading of the text, or of the existing file to check it, in constant memory.

    Raises:
        TextError: the text cannot be read or encoded, or the file cannot be written.
    """
    vocabulary = fingerprint(tokenizer)
    key = hashlib.sha256(f"{FORMAT}/{corpus.sha256}/{vocabulary}".encode()).hexdigest()[:32]
    path = Path(folder or cache_folder() / "tokens") / f"{tokenizer.kind}-{key}.bin"
    try:
        return open_tokens(path, corpus=corpus.sha256, tokenizer=vocabulary)
    except TextError:
        chunks = corpus.read_bytes() if tokenizer.reads_bytes else corpus.read()
        encoded = tokenizer.encode_stream(chunks)
        return write_tokens(path, encoded, tokenizer.vocab_size, corpus=corpus.sha256, tokenizer=vocabulary)


# The numbers are renamed into place before their description. Whoever comes between finds numbers that do not
# fit the description, and builds them anew.
def write_tokens(
    path: Path, chunks: Iterable[Ids], vocab_size: int, *, corpus: str = "", tokenizer: str = ""
) -> Tokens:
    r"""Write tokens as `path` (`.bin`) and its description beside it (`.json`), each in one rename.

    Raises:
        TextError: a token is not below `vocab_size`, or the folder cannot be written.
    """
    dtype, digest, count = token_dtype(vocab_size), hashlib.sha256(), 0
    with atomic_file(path) as file:
        for chunk in chunks:
            if chunk.size and not 0 <= int(chunk.min()) <= int(chunk.max()) < vocab_size:
                raise TextError(
                    f"tokens {chunk.min()} to {chunk.max()} do not fit a vocabulary of {vocab_size}"
                )
            raw = chunk.astype(dtype).tobytes()
            digest.update(raw)
            file.write(raw)
            count += chunk.size
    description = {
        "format": FORMAT,
        "dtype": dtype.name,
        "count": count,
        "tokenizer": tokenizer,
        "corpus": corpus,
    }
    with atomic_file(path.with_suffix(".json")) as file:
        file.write(json.dumps(description | {"sha256": digest.hexdigest()}, indent=1).encode())
    return open_tokens(path, corpus=corpus, tokenizer=tokenizer)


# The description names no other file: the numbers are always those beside it, so it cannot be made to point
# at anything else on the machine.
def open_tokens(path: str | Path, *, corpus: str | None = None, tokenizer: str | None = None) -> Tokens:
    r"""Open a token file and check it against its description, and both against what is expected.

    Raises:
        TextError: either file is missing or damaged, or belongs to another text or tokenizer.
    """
    path = Path(path)
    described = _read_description(path.with_suffix(".json"))
    for name, expected in (("corpus", corpus), ("tokenizer", tokenizer)):
        if expected is not None and described[name] != expected:
            raise TextError(
                f"{str(path)!r} belongs to another {name}: {described[name]}, expected {expected}"
            )
    file = TokenFile(
        path, np.dtype(described["dtype"]).newbyteorder("<"), described["count"], described["sha256"]
    )
    return Tokens(file, 0, file.count)


def _read_description(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > CHUNK:
            raise ValueError("it is larger than any description")
        described = json.loads(path.read_bytes())
    except OSError as error:
        raise TextError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TextError(f"{str(path)!r} does not describe a token file: {error}") from None
    if not isinstance(described, dict) or {name: type(value) for name, value in described.items()} != _FIELDS:
        raise TextError(
            f"{str(path)!r} does not describe a token file: its fields must be {', '.join(_FIELDS)}"
        )
    if described["format"] != FORMAT:
        raise TextError(f"{str(path)!r} has format {described['format']}; this version reads format {FORMAT}")
    if described["dtype"] not in ("uint8", "uint16", "uint32") or described["count"] < 0:
        raise TextError(f"{str(path)!r} describes {described['count']} tokens of type {described['dtype']!r}")
    return described


# Exact fractions: 0.9 as a binary number is a little more than nine tenths, which some lengths would notice.
def split(
    tokens: Tokens, shares: Sequence[float] = (0.9, 0.1), *, seq_len: int | None = None
) -> tuple[Tokens, ...]:
    r"""Cut a text into parts in order: training, validation, and further ones.

    Part `k` ends at the whole tokens within the first `k` shares; the last takes the rest. With `seq_len`,
    check that training has one window and every other part one target.

    Raises:
        TextError: the shares do not add up to 1, or the text is too short, saying how short.
    """
    exact = [Fraction(str(share)) for share in shares]
    if any(share <= 0 for share in exact) or sum(exact) != 1:
        raise TextError(f"shares {tuple(shares)}: each must be above 0, and together they must be 1")
    cuts = _cuts(len(tokens), exact)
    if seq_len is not None and not _usable(cuts, seq_len):
        smallest = max(len(tokens) + 1, int((seq_len + 1) / exact[0]))
        while not _usable(_cuts(smallest, exact), seq_len):
            smallest += 1
        raise TextError(
            f"the text has {len(tokens)} tokens, too few for windows of seq_len={seq_len}: its training part "
            f"has {cuts[1]}, and needs {seq_len + 1}. The smallest usable text has {smallest} tokens; take a "
            "longer text or a smaller seq_len"
        )
    return tuple(tokens.part(start, stop) for start, stop in pairwise(cuts))


def _cuts(count: int, shares: list[Fraction]) -> list[int]:
    return [int(count * sum(shares[:part])) for part in range(len(shares) + 1)]


def _usable(cuts: list[int], seq_len: int) -> bool:
    training, *others = (stop - start for start, stop in pairwise(cuts))
    return training > seq_len and all(part >= 2 for part in others)


def count_tokens(tokens: Tokens, vocab_size: int) -> Ids:
    r"""Count how often each token occurs, `[vocab_size]`."""
    counts = np.zeros(vocab_size, np.int64)
    for chunk in tokens.chunks():
        counts += np.bincount(chunk, minlength=vocab_size)
    return counts


# A model can only guess at symbols it was never shown. They are no error, but whoever reads the validation
# loss should know of them before the training starts.
def unseen_symbols(tokenizer: Tokenizer, training: Tokens, validation: Tokens) -> dict[str, int]:
    r"""Return the symbols of the validation text that training never shows, and how often each occurs."""
    shown = count_tokens(training, tokenizer.vocab_size)
    asked = count_tokens(validation, tokenizer.vocab_size)
    return {
        tokenizer.symbol(int(token)): int(asked[token])
        for token in np.flatnonzero((shown == 0) & (asked > 0))
    }


def measure(tokenizer: Tokenizer, tokens: Tokens) -> Units:
    r"""Count the tokens, characters and bytes of a text: what turns its loss into bits per character."""
    return tokenizer.measure(tokens.chunks())


def _stamp(file: BinaryIO) -> tuple[int, int, int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino
