r"""The kinds of tokenizers, and how each is made, stored and found again.

| kind | a token is | vocabulary | unknown symbols |
| --- | --- | --- | --- |
| `characters` | one character | every character of the texts | an error |
| `bytes` | one byte, read raw | 256 | none exist |
| `words` | an English word, lower case, or one mark | every word, or the commonest | an error, or `<unk>` |
| `bpe` | a run of bytes that is common | 256 bytes and learned merges | none exist |

The vocabulary is taken from training and validation text together, so that no symbol of the validation text
is unknown; `unseen_symbols` in `token_files` tells which of them training never shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from postil.text.algorithmic import VOCABULARY, ProgramTokens
from postil.text.byte_pairs import BytePairs
from postil.text.characters import Bytes, Characters
from postil.text.corpora import Corpus
from postil.text.reading import TextError
from postil.text.tokenizer import FORMAT, Tokenizer
from postil.text.words import Words

__all__ = ["TOKENIZERS", "build_tokenizer", "tokenizer_from_dict"]

TOKENIZERS = ("characters", "bytes", "words", "bpe")


def build_tokenizer(kind: str, *corpora: Corpus, vocab_size: int | None = None) -> Tokenizer:
    r"""Make a tokenizer of a kind of `TOKENIZERS` for one or several texts.

    `vocab_size` is for `words` (default: every word) and `bpe` (default: 4096).

    Cost: one reading of the texts; memory for the vocabulary and one chunk.

    Raises:
        TextError: the kind does not exist, `vocab_size` does not fit it, or a text cannot be read.
    """
    if kind not in TOKENIZERS:
        raise TextError(f"tokenizer {kind!r} does not exist; there are {', '.join(TOKENIZERS)}")
    if kind in ("characters", "bytes") and vocab_size is not None:
        raise TextError(
            f"vocab_size={vocab_size}: the vocabulary of {kind!r} follows from the text; leave it out"
        )
    if kind == "bytes":
        return Bytes()
    chunks: Iterator[str] = chain.from_iterable(corpus.read() for corpus in corpora)
    if kind == "characters":
        return Characters.of(chunks)
    if kind == "words":
        return Words.of(chunks, vocab_size)
    return BytePairs.of(chunks, vocab_size or 4096)


# What a run stores may have passed through many hands. It is data of one of four shapes, and anything else
# is refused before it is used.
def tokenizer_from_dict(description: Any) -> Tokenizer:
    r"""Build the tokenizer that `to_dict` described.

    Raises:
        TextError: the description is not one of this library's, or of a newer format.
    """
    if not isinstance(description, dict):
        raise TextError(f"a tokenizer is described by an object, not by {type(description).__name__}")
    if description.get("format") != FORMAT:
        raise TextError(f"tokenizer format {description.get('format')!r}: this version reads format {FORMAT}")
    kind = description.get("kind")
    if kind == "bytes":
        _fields(description)
        return Bytes()
    if kind == "characters":
        _fields(description, "alphabet")
        return Characters(_text(description["alphabet"], "alphabet"))
    if kind == "words":
        _fields(description, "words")
        return Words([_text(word, "word") for word in _list(description["words"], "words")])
    if kind == "bpe":
        _fields(description, "merges")
        return BytePairs([_pair(merge) for merge in _list(description["merges"], "merges")])
    if kind == "programs":
        _fields(description, "words")
        if description["words"] != list(VOCABULARY):
            raise TextError("the words of the programs are not those of this version: train anew")
        return ProgramTokens()
    raise TextError(f"tokenizer kind {kind!r} does not exist; there are {', '.join(TOKENIZERS)}")


def _fields(description: dict[str, Any], *names: str) -> None:
    expected = {"format", "kind", *names}
    if set(description) != expected:
        wrong = sorted(map(repr, expected.symmetric_difference(description)))
        raise TextError(f"the description of a tokenizer lacks or should not have: {', '.join(wrong)}")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TextError(f"the {name} of a tokenizer must be text, not {value!r:.80}")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise TextError(f"the {name} of a tokenizer must be a list, not {value!r:.80}")
    return value


def _pair(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or [type(number) for number in value] != [int, int]:
        raise TextError(f"a merge must be two token numbers, not {value!r:.80}")
    return value[0], value[1]
