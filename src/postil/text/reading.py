r"""The reading rule: how bytes become text.

Training text, validation text and prompts are read by one rule, so that a model is asked in the alphabet it
was taught:

* the bytes are UTF-8, whatever the locale of the machine says;
* a byte-order mark at the very start is dropped;
* CRLF and a lone CR become LF.

Bytes that are not UTF-8 are an error that names the file and the offset. Whoever wants the bytes as they are
takes the `bytes` tokenizer, which reads no text at all.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterable, Iterator

__all__ = ["TextError", "clean_text", "decode_chunks", "pieces"]

CHUNK = 1 << 20
"""Bytes read at a time; the memory of every reader is a small multiple of it, however long the text."""


class TextError(ValueError):
    r"""A text, a name or a token file that cannot be used; the message names it and the remedy."""


def clean_text(text: str) -> str:
    r"""Apply the reading rule to text already decoded, such as a prompt from the command line."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


# A chunk may end inside a character, or between CR and LF. Both decoders below keep the unfinished part for
# the next chunk, so the text does not depend on where the chunks were cut.
def decode_chunks(chunks: Iterable[bytes], source: str) -> Iterator[str]:
    r"""Read bytes chunk by chunk by the reading rule; `source` names them in errors.

    Cost: memory of one chunk.

    Raises:
        TextError: the bytes are not UTF-8.
    """
    utf8 = codecs.getincrementaldecoder("utf-8")("strict")
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    offset, at_start = 0, True
    for chunk, final in _mark_last(chunks):
        pending = len(utf8.getstate()[0])
        try:
            text = utf8.decode(chunk, final)
        except UnicodeDecodeError as error:
            raise _not_utf8(error, source, offset - pending + error.start) from None
        offset += len(chunk)
        if text and at_start:
            text, at_start = text.removeprefix("\ufeff"), False
        text = newlines.decode(text, final)
        if text:
            yield text


# A token of words or of byte pairs holds several characters, and a cut inside of it would make two of it. No
# such token goes on from a visible character to a blank, so a text may be cut between the two. Where 65,536
# characters hold no such place they are cut off all the same, so that memory stays bounded.
def pieces(chunks: Iterable[str], limit: int = 1 << 16) -> Iterator[str]:
    r"""Cut a stream of text into pieces of at most `limit` characters, at the last word boundary of each.

    Where the cuts fall depends on the text alone, not on the chunks in which it came.
    """
    text = ""
    for chunk in chunks:
        text, start = text + chunk, 0
        while len(text) - start > limit:
            boundary = _BOUNDARY.match(text, start, start + limit + 1)
            stop = boundary.end() if boundary else start + limit
            yield text[start:stop]
            start = stop
        text = text[start:]
    if text:
        yield text


_BOUNDARY = re.compile(r".*\S(?=[ \n])", re.DOTALL)


def _mark_last(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    for chunk in chunks:
        yield chunk, False
    yield b"", True


def _not_utf8(error: UnicodeDecodeError, source: str, offset: int) -> TextError:
    if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") and offset == 0:
        remedy = "it looks like UTF-16; convert it, for example with `iconv -f UTF-16 -t UTF-8`"
    else:
        remedy = "convert it to UTF-8, or take `--tokenizer bytes`, which reads the bytes as they are"
    byte = error.object[error.start]
    return TextError(
        f"{source} is not UTF-8 at byte offset {offset} (0x{byte:02x}, {error.reason}): {remedy}"
    )
