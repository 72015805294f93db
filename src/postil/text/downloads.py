r"""Fetching a corpus once, and trusting it never.

Each public corpus is pinned: its address, its size and its hashes stand in this file. What arrives is written
under another name, checked, and only then renamed; what lies in the cache is checked again at every use,
since a partial or damaged file looks like a whole one until it is hashed.
"""

from __future__ import annotations

import hashlib
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urljoin

import pooch

from postil import durable
from postil.text.reading import CHUNK, TextError
from postil.text.storage import atomic_file

__all__ = ["SOURCES", "Source", "Unreachable", "fetch", "is_intact"]


class Unreachable(TextError):
    r"""A public corpus is not in the cache and cannot be fetched now."""


@dataclass(frozen=True)
class Source:
    r"""A pinned public file: what to fetch, and what must have arrived.

    `size` (bytes) and `digest` (`algorithm:hex`) describe the text itself; `archive_size` and
    `archive_digest` the zip file around it, if there is one, whose member `file` is the text.
    """

    url: str
    file: str
    size: int
    digest: str
    archive_size: int = 0
    archive_digest: str = ""


SOURCES: dict[str, Source] = {
    "tiny-shakespeare": Source(
        url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        file="input.txt",
        size=1_115_394,
        digest="sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
    "enwik8": Source(
        url="https://mattmahoney.net/dc/enwik8.zip",
        file="enwik8",
        size=100_000_000,
        digest="md5:a1fa5ffddb56f4953e226637dabbb36a",
        archive_size=36_445_475,
        archive_digest="sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
    ),
    "text8": Source(
        url="https://mattmahoney.net/dc/text8.zip",
        file="text8",
        size=100_000_000,
        digest="md5:3bea1919949baf155f99411df5fada7e",
        archive_size=31_344_016,
        archive_digest="sha256:a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
    ),
}


# The size comes first: it is free, and it catches what an interrupted download leaves.
def is_intact(path: Path, source: Source) -> bool:
    r"""Tell whether `path` holds exactly the text of `source`.

    Cost: one reading of the file.
    """
    if path.stat().st_size != source.size:
        return False
    algorithm, _, expected = source.digest.partition(":")
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == expected


# Looking up a host name can hang for half a minute where a network swallows the question, and no timeout of
# a socket covers it. Waiting in another thread does.
def fetch(name: str, folder: Path, *, patience: float | None = None) -> tuple[Path, str]:
    r"""Return the checked text of `SOURCES[name]`, and whether it came from the "cache" or by "download".

    It lies in `folder`; a damaged copy there is discarded and fetched again.

    `patience` is the time in seconds after which the caller goes on without it (`None`: as long as data
    keeps coming).

    Raises:
        Unreachable: it cannot be fetched, or what arrives is not what was pinned.
    """
    outcome: list[tuple[Path, str] | BaseException] = []

    def attempt() -> None:
        try:
            outcome.append(_fetch(name, SOURCES[name], folder))
        except BaseException as error:
            outcome.append(error)

    if patience is None:
        attempt()
    else:
        worker = threading.Thread(target=attempt, daemon=True)
        worker.start()
        worker.join(patience)
    if not outcome:
        raise _unreachable(name, f"no answer within {patience:g} seconds")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _fetch(name: str, source: Source, folder: Path) -> tuple[Path, str]:
    target = durable.inside(folder, name, "corpus name") / source.file
    if target.exists():
        if is_intact(target, source):
            return target, "cache"
        target.unlink()
    try:
        if source.archive_size:
            archive = _download(
                source.url, target.with_suffix(".zip"), source.archive_size, source.archive_digest
            )
            _extract(archive, source, target)
            archive.unlink()
        else:
            _download(source.url, target, source.size, source.digest)
        if not is_intact(target, source):
            target.unlink()
            raise ValueError("what arrived has another size or hash")
    except TextError:
        raise
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise _unreachable(name, str(error)) from error
    return target, "download"


def _download(url: str, target: Path, size: int, digest: str) -> Path:
    pooch.get_logger().setLevel("WARNING")

    def bounded(address: str, output: Any, _: Any) -> None:
        download = pooch.HTTPDownloader(
            chunk_size=CHUNK, timeout=(4, 30), hooks={"response": refuse_downgrade}
        )
        with Path(output).open("wb") as file:
            download(address, _Bounded(file, size), None)

    downloader: Any = bounded
    return Path(pooch.retrieve(url, digest, fname=target.name, path=target.parent, downloader=downloader))


def refuse_downgrade(response: Any, **_: Any) -> None:
    r"""Refuse a redirect from https to anything else, before it is followed."""
    if response.is_redirect:
        onward = urljoin(response.url, response.headers["location"])
        if response.url.startswith("https:") and not onward.startswith("https:"):
            raise ValueError(f"redirect from {response.url} to {onward}, which is not https")


class _Bounded:
    # A server that never stops sending would otherwise fill the disk before the hash could object.
    def __init__(self, file: BinaryIO, room: int):
        self.file, self.room = file, room

    def write(self, data: bytes) -> None:
        self.room -= len(data)
        if self.room < 0:
            raise ValueError("the server sends more than the pinned size")
        self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


# The one member wanted is read by its name and written under ours, at most to its pinned size. Whatever else
# an archive holds, links and paths with dots included, is never touched.
def _extract(archive: Path, source: Source, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(archive) as container,
            container.open(source.file) as member,
            atomic_file(target) as file,
        ):
            bounded = _Bounded(file, source.size)
            while chunk := member.read(CHUNK):
                bounded.write(chunk)
    except KeyError:
        raise ValueError(f"the archive has no member {source.file!r}") from None


def _unreachable(name: str, reason: str) -> Unreachable:
    source = SOURCES[name]
    return Unreachable(
        f"cannot fetch {name} from {source.url}: {reason}. Expected: {source.size} bytes, {source.digest}. "
        f"Without a network, place it at $POSTIL_DATA/{name}/{source.file}, or take --text python-docs"
    )
