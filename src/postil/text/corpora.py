r"""Corpora: a text by its name or its path.

Whatever a text comes from (a public corpus, the documentation that ships inside Python, a file, a folder,
standard input), the rest of the library sees one small value: what it is called, how it was obtained, its
size and its hash, and a way to read it chunk by chunk. The value is written into every run, so that a result
can say what it was trained on.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

from postil.text.downloads import SOURCES, Unreachable, fetch, is_intact
from postil.text.reading import CHUNK, TextError, decode_chunks
from postil.text.storage import atomic_file, cache_folder

__all__ = ["CORPORA", "Corpus", "default_corpus", "load_corpus", "read_text"]

CORPORA = (*SOURCES, "python-docs")
"""The corpora that have a name; anything else is a path, or `-` for standard input."""


@dataclass(frozen=True)
class Corpus:
    r"""A text that can be read as often as needed.

    `size` counts bytes and `sha256` hashes them, as they lie on disk. `origin` says how the text was
    obtained; `python` is the version whose documentation it is; `note` is what a person should be told.
    """

    name: str
    origin: str
    size: int
    sha256: str
    paths: tuple[Path, ...] = ()
    text: str | None = field(default=None, repr=False)
    python: str | None = None
    note: str = ""

    # The hash is taken again at every reading: a file that changed since it was first read would otherwise
    # train a model on something no record names.
    def read_bytes(self) -> Iterator[bytes]:
        r"""Read the bytes as they are, in chunks.

        Raises:
            TextError: a file cannot be read, or changed since the corpus was loaded.
        """
        yield from chain.from_iterable(self._checked_parts())

    def read(self) -> Iterator[str]:
        r"""Read the text by the reading rule, in chunks.

        Raises:
            TextError: the bytes are not UTF-8, or as for `read_bytes`.
        """
        # The strict zip asks for one part more than there are files; that is when the hash is compared.
        for source, part in zip(self.paths or (self.name,), self._checked_parts(), strict=True):
            yield from decode_chunks(part, repr(str(source)))

    def to_dict(self) -> dict[str, Any]:
        r"""Return what a run records: everything but the text itself."""
        record = {"name": self.name, "origin": self.origin, "size": self.size, "sha256": self.sha256}
        record["paths"] = [str(path) for path in self.paths]
        return record | {"python": self.python, "note": self.note}

    def _checked_parts(self) -> Iterator[Iterable[bytes]]:
        digest = hashlib.sha256()
        for part in _parts(self.paths) if self.text is None else iter([[self.text.encode()]]):
            yield _hashed(part, digest)
        if digest.hexdigest() != self.sha256:
            raise TextError(f"{self.name} changed while it was in use: start again to read it as it is now")


def load_corpus(name_or_path: str, *, data_dir: str | Path | None = None) -> Corpus:
    r"""Find a text: a name of `CORPORA`, `-` for standard input, a file, or a folder of text files.

    A named corpus is looked for in `data_dir` (default: the folder named by `POSTIL_DATA`) as
    `NAME/FILE`, then in the user's cache folder, then fetched. A name wins over a file of the same name;
    `./NAME` means the file. The files of a folder and of its subfolders are joined in the order of their
    relative paths, hidden ones left out; a file that does not end its last line has it ended.

    Cost: one reading of the text, in constant memory.

    Raises:
        TextError: nothing has that name, it cannot be read or fetched, or it holds no text.
    """
    if name_or_path == "python-docs":
        return _python_docs()
    if name_or_path in SOURCES:
        path, origin = _locate(name_or_path, data_dir)
        return _from_files(name_or_path, origin, (path,))
    if name_or_path == "-":
        return _from_stream(sys.stdin.buffer, "standard input")
    return _from_path(name_or_path)


# A first run should train on something within seconds, with a network or without. Which of the two texts it
# was must not be a secret: the numbers are not comparable.
def default_corpus(*, data_dir: str | Path | None = None, patience: float = 5.0) -> Corpus:
    r"""Return Tiny Shakespeare if it is at hand or arrives within `patience` seconds, else `python-docs`.

    In the second case `note` says so.
    """
    try:
        path, origin = _locate("tiny-shakespeare", data_dir, patience=patience)
    except Unreachable:
        note = (
            f"tiny-shakespeare is not at hand and did not arrive within {patience:g} s: this is python-docs, "
            "the language reference inside Python. Its figures compare with nothing else; "
            "--text tiny-shakespeare tells what is missing"
        )
        return replace(_python_docs(), note=note)
    return _from_files("tiny-shakespeare", origin, (path,))


def read_text(path: str) -> str:
    r"""Read a short text whole, such as a prompt, by the reading rule; `-` is standard input.

    Raises:
        TextError: it cannot be read, or is not UTF-8.
    """
    if path == "-":
        return "".join(decode_chunks(iter(lambda: sys.stdin.buffer.read(CHUNK), b""), "standard input"))
    return "".join(decode_chunks(_file_bytes(Path(path)), repr(path)))


def _locate(name: str, data_dir: str | Path | None, patience: float | None = None) -> tuple[Path, str]:
    source = SOURCES[name]
    data_dir = data_dir or os.environ.get("POSTIL_DATA")
    if data_dir and (path := Path(data_dir) / name / source.file).is_file():
        # This folder belongs to the person who named it, so a damaged file there is reported, not removed.
        if not is_intact(path, source):
            raise TextError(
                f"{str(path)!r} is not {name}: it has {path.stat().st_size} bytes, expected are "
                f"{source.size} bytes with {source.digest}; remove it, or name it by its path to train on it "
                "as it is"
            )
        return path, "data folder"
    return fetch(name, cache_folder(), patience=patience)


def _python_docs() -> Corpus:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise TextError("this Python ships without pydoc_data.topics; name a text file with --text") from None
    text = "\n\n".join(topics[topic].strip("\n") for topic in sorted(topics)) + "\n"
    raw = text.encode()
    version = platform.python_version()
    digest = hashlib.sha256(raw).hexdigest()
    return Corpus("python-docs", "pydoc_data.topics", len(raw), digest, text=text, python=version)


def _from_path(name: str) -> Corpus:
    if not name:
        raise _no_such_text(name, ValueError("a text needs a name or a path"))
    path = Path(name)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise _no_such_text(name, error) from None
    if stat.S_ISDIR(mode):
        paths = tuple(_walk(path))
        if not paths:
            raise TextError(f"the folder {name!r} holds no files (hidden ones are left out)")
        return _from_files(path.resolve().name or "folder", "folder", paths)
    if stat.S_ISREG(mode):
        return _from_files(path.name, "file", (path,))
    # A pipe can be read once only, and a corpus is read several times.
    with _open(path) as stream:
        return _from_stream(stream, name)


def _walk(folder: Path) -> list[Path]:
    found: list[Path] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent) / name for name in files if not name.startswith(".")]
    found = [path for path in found if path.is_file() or not path.exists()]  # opening a pipe waits for ever
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _from_files(name: str, origin: str, paths: tuple[Path, ...]) -> Corpus:
    digest, size, visible = hashlib.sha256(), 0, False
    for part in _parts(paths):
        for chunk in _hashed(part, digest):
            size += len(chunk)
            visible = visible or bool(chunk.removeprefix(b"\xef\xbb\xbf").strip())
    if not visible:
        where = repr(str(paths[0])) if len(paths) == 1 else f"the folder {name!r}"
        raise TextError(f"{where} holds no text: {size} bytes, all of them blank. Name a text to train on")
    return Corpus(name, origin, size, digest.hexdigest(), tuple(path.absolute() for path in paths))


# Standard input is copied into the cache under its own hash, so that it can be read again, by a resumed run
# too, and so that it may be larger than memory.
def _from_stream(stream: Any, name: str) -> Corpus:
    folder = cache_folder() / "standard-input"
    incoming, digest = folder / f"incoming-{os.getpid()}", hashlib.sha256()
    with atomic_file(incoming) as file:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
            file.write(chunk)
    path = folder / f"{digest.hexdigest()}.txt"
    incoming.replace(path)
    try:
        return _from_files(name, "standard input", (path,))
    except TextError:
        path.unlink()
        raise TextError(f"{name} holds no text: nothing but blanks arrived") from None


def _parts(paths: tuple[Path, ...]) -> Iterator[Iterator[bytes]]:
    for path in paths:
        yield _file_bytes(path, end_line=path != paths[-1])


def _file_bytes(path: Path, end_line: bool = False) -> Iterator[bytes]:
    last = b"\n"
    with _open(path) as file:
        while chunk := _read(file, path):
            last = chunk[-1:]
            yield chunk
    if end_line and last not in b"\r\n":
        yield b"\n"


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except (OSError, ValueError) as error:
        raise _no_such_text(str(path), error) from None


def _read(file: Any, path: Path) -> bytes:
    try:
        return file.read(CHUNK)
    except OSError as error:
        raise _no_such_text(str(path), error) from None


def _hashed(chunks: Iterable[bytes], digest: Any) -> Iterator[bytes]:
    for chunk in chunks:
        digest.update(chunk)
        yield chunk


def _no_such_text(name: str, error: Exception) -> TextError:
    reason = getattr(error, "strerror", None) or str(error)
    alike = get_close_matches(name, CORPORA, n=1)
    hint = f"; did you mean {alike[0]}?" if alike else f"; names: {', '.join(CORPORA)}"
    return TextError(f"cannot read the text {name!r}: {reason}{hint}")
