from __future__ import annotations

import hashlib
import io
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from postil.text import corpora, downloads
from postil.text.corpora import Corpus, default_corpus, load_corpus, read_text
from postil.text.downloads import Source, refuse_downgrade
from postil.text.reading import TextError

TEXT = "To be, or not to be.\n"
DATA = os.environ.get("POSTIL_DATA", "")


def whole(corpus: Corpus) -> str:
    return "".join(corpus.read())


def pin(monkeypatch: pytest.MonkeyPatch, source: Source, name: str = "tiny-shakespeare") -> None:
    monkeypatch.setitem(downloads.SOURCES, name, source)


def small_source(url: str, data: bytes = TEXT.encode()) -> Source:
    return Source(url, "input.txt", len(data), "sha256:" + hashlib.sha256(data).hexdigest())


def nowhere() -> Source:
    return small_source("http://127.0.0.1:9/input.txt")


# Files, folders, standard input


def test_a_file(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT.encode())
    corpus = load_corpus(str(path))
    assert whole(corpus) == TEXT
    assert (corpus.name, corpus.origin, corpus.size) == ("a.txt", "file", len(TEXT))
    assert corpus.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
    assert corpus.to_dict()["paths"] == [str(path)]


def test_a_folder_is_joined_by_relative_path_and_each_file_ends_its_line(tmp_path: Path):
    for name, data in {
        "b.txt": b"\xef\xbb\xbfsecond",
        "a/z.txt": b"first\r\n",
        "c.txt": b"last",
        ".hidden": b"no",
        ".git/x": b"no",
        "b/empty": b"",
    }.items():
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_bytes(data)
    corpus = load_corpus(str(tmp_path / "texts"))
    assert whole(corpus) == "first\nsecond\nlast"
    assert b"".join(corpus.read_bytes()) == b"first\r\n\xef\xbb\xbfsecond\nlast"
    assert (corpus.name, corpus.origin, corpus.size) == ("texts", "folder", 21)


def test_a_bad_file_in_a_folder_is_named(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"good")
    (tmp_path / "b.png").write_bytes(b"\x89PNG")
    with pytest.raises(TextError, match=r"b\.png.*byte offset 0"):
        whole(load_corpus(str(tmp_path)))


def test_standard_input_can_be_read_twice(monkeypatch: pytest.MonkeyPatch, own_folders: Path):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xc3\xa9\r\n"), encoding="ascii"))
    corpus = load_corpus("-")
    assert whole(corpus) == whole(corpus) == "café\n"
    assert corpus.origin == "standard input" and corpus.paths[0].is_relative_to(own_folders)
    assert [path.suffix for path in (own_folders / "standard-input").iterdir()] == [".txt"]


def test_a_pipe_is_read_like_standard_input(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = subprocess.Popen(["sh", "-c", f"printf 'To be' > '{pipe}'"])
    corpus = load_corpus(str(pipe))
    assert writer.wait() == 0
    assert whole(corpus) == whole(corpus) == "To be"


@pytest.mark.timeout(60)
def test_a_pipe_in_a_folder_is_left_out(tmp_path: Path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("To be")
    os.mkfifo(folder / "pipe")
    assert [path.name for path in load_corpus(str(folder)).paths] == ["a.txt"]


@pytest.mark.parametrize("data", ["Prompt\r\n", "\ufeffPrompt\n", "Prompt\r"])
def test_a_prompt_is_read_by_the_same_rule(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "prompt"
    path.write_bytes(data.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data.encode())))
    assert read_text(str(path)) == read_text("-") == whole(load_corpus(str(path))) == "Prompt\n"


@pytest.mark.case("BC090")
@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf", b"\n", b"\r\n", b" \t\n\n", b"\xef\xbb\xbf\n"])
def test_a_text_without_text_is_an_error(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "void.txt"
    path.write_bytes(data)
    with pytest.raises(TextError, match=r"void\.txt.*holds no text"):
        load_corpus(str(path))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    with pytest.raises(TextError, match="holds no text"):
        load_corpus("-")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(TextError, match="holds no files"):
        load_corpus(str(folder))
    (folder / "a").write_bytes(data)
    with pytest.raises(TextError, match="holds no text"):
        load_corpus(str(folder))


def test_a_file_that_changes_between_two_readings_is_noticed(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("one text")
    corpus = load_corpus(str(path))
    path.write_text("two text")
    for read in (corpus.read, corpus.read_bytes):
        with pytest.raises(TextError, match="changed"):
            list(read())


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tiny-shakespear", "did you mean tiny-shakespeare"),
        ("no/such", "No such file"),
        ("a\0b", "null"),
        ("", "names:"),
    ],
)
def test_an_unknown_text_is_a_clear_error(name: str, hint: str):
    with pytest.raises(TextError, match=hint):
        load_corpus(name)


@pytest.mark.case("BC074")
def test_the_locale_changes_nothing(tmp_path: Path):
    path = tmp_path / "naïve.txt"
    path.write_bytes("Ça va? 漢字、かな。 naïve ü\n".encode())
    program = (
        "import sys, json; from postil.text import load_corpus, build_tokenizer, read_text\n"
        "corpora = [load_corpus(sys.argv[1]), load_corpus('-')]\n"
        "print(json.dumps([build_tokenizer('characters', c).to_dict() for c in corpora]))"
    )

    def vocabulary(**locale: str) -> bytes:
        keep = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("LC_", "LANG", "PYTHON"))
        }
        return subprocess.run(
            [sys.executable, "-c", program, str(path)],
            env=keep | locale,
            input=path.read_bytes(),
            stdout=subprocess.PIPE,
            check=True,
        ).stdout

    plain = vocabulary(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert plain == vocabulary(LC_ALL="C.UTF-8", PYTHONUTF8="1")
    assert b"\\u6f22" in plain and b"\\u00c7" in plain


# Named corpora


def test_python_docs_need_no_network_and_name_their_version():
    corpus = load_corpus("python-docs")
    text = whole(corpus)
    assert len(text) > 300_000 and "assert" in text
    assert corpus.python == platform.python_version()
    assert corpus.sha256 == hashlib.sha256(text.encode()).hexdigest() and corpus.size == len(text.encode())
    assert load_corpus("python-docs") == corpus and text not in repr(corpus)


def test_the_data_folder_is_looked_in_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pin(monkeypatch, nowhere())
    path = tmp_path / "data" / "tiny-shakespeare" / "input.txt"
    path.parent.mkdir(parents=True)
    path.write_text(TEXT)
    assert load_corpus("tiny-shakespeare", data_dir=tmp_path / "data").paths == (path,)
    monkeypatch.setenv("POSTIL_DATA", str(tmp_path / "data"))
    assert load_corpus("tiny-shakespeare").origin == "data folder"
    assert default_corpus().name == "tiny-shakespeare"


@pytest.mark.case("BC136")
@pytest.mark.parametrize("damaged", [TEXT[:-3], TEXT.replace("be", "bo"), ""])
def test_a_damaged_file_in_the_data_folder_is_reported_and_kept(
    damaged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pin(monkeypatch, nowhere())
    path = tmp_path / "tiny-shakespeare" / "input.txt"
    path.parent.mkdir(parents=True)
    path.write_text(damaged)
    with pytest.raises(TextError, match=downloads.SOURCES["tiny-shakespeare"].digest):
        load_corpus("tiny-shakespeare", data_dir=tmp_path)
    assert path.read_text() == damaged


def test_a_download_is_checked_and_kept(server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch):
    url, served = server
    (served / "input.txt").write_text(TEXT)
    pin(monkeypatch, small_source(f"{url}/input.txt"))
    assert load_corpus("tiny-shakespeare").origin == "download"
    pin(monkeypatch, nowhere())
    again = load_corpus("tiny-shakespeare")
    assert again.origin == "cache" and whole(again) == TEXT


@pytest.mark.case("BC136")
@pytest.mark.parametrize(
    "damaged", [TEXT[:-3], TEXT.replace("be", "bo"), ""], ids=["truncated", "wrong", "empty"]
)
def test_a_damaged_file_in_the_cache_is_fetched_again(
    damaged: str, server: tuple[str, Path], own_folders: Path, monkeypatch: pytest.MonkeyPatch
):
    url, served = server
    cached = own_folders / "tiny-shakespeare" / "input.txt"
    cached.parent.mkdir(parents=True)
    cached.write_text(damaged)
    pin(monkeypatch, nowhere())
    with pytest.raises(TextError) as caught:
        load_corpus("tiny-shakespeare")
    assert nowhere().digest in str(caught.value) and "POSTIL_DATA" in str(caught.value)
    assert list(cached.parent.iterdir()) == []

    cached.write_text(damaged)
    (served / "input.txt").write_text(TEXT)
    pin(monkeypatch, small_source(f"{url}/input.txt"))
    assert whole(load_corpus("tiny-shakespeare")) == TEXT
    assert [entry.name for entry in cached.parent.iterdir()] == ["input.txt"]


@pytest.mark.case("BC136")
@pytest.mark.parametrize(
    "sent", [TEXT[:-3], TEXT.replace("be", "bo"), TEXT * 1000], ids=["short", "wrong", "endless"]
)
def test_a_bad_download_never_takes_the_final_name(
    sent: str, server: tuple[str, Path], own_folders: Path, monkeypatch: pytest.MonkeyPatch
):
    url, served = server
    (served / "input.txt").write_text(sent)
    pin(monkeypatch, small_source(f"{url}/input.txt"))
    with pytest.raises(TextError, match=small_source(url).digest):
        load_corpus("tiny-shakespeare")
    assert list((own_folders / "tiny-shakespeare").iterdir()) == []


def archived(served: Path, url: str, members: dict[str, bytes]) -> Source:
    path = served / "enwik8.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    raw, text = path.read_bytes(), TEXT.encode()
    digest = "sha256:" + hashlib.sha256(raw).hexdigest()
    return Source(
        f"{url}/enwik8.zip", "enwik8", len(text), "md5:" + hashlib.md5(text).hexdigest(), len(raw), digest
    )


@pytest.mark.case("BC134")
def test_only_the_wanted_member_of_an_archive_is_written(
    server: tuple[str, Path], own_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url, served = server
    pin(
        monkeypatch,
        archived(served, url, {"../../escape": b"!", "/abs": b"!", "enwik8": TEXT.encode()}),
        "enwik8",
    )
    assert whole(load_corpus("enwik8")) == TEXT
    assert [entry.name for entry in (own_folders / "enwik8").iterdir()] == ["enwik8"]
    assert not (tmp_path / "escape").exists() and not (own_folders / "escape").exists()


@pytest.mark.parametrize(
    "members", [{"enwik8": b"\0" * 1_000_000}, {"enwik8": TEXT[1:].encode()}, {"other": TEXT.encode()}]
)
def test_a_bad_archive_leaves_nothing(
    members: dict[str, bytes], server: tuple[str, Path], own_folders: Path, monkeypatch: pytest.MonkeyPatch
):
    url, served = server
    pin(monkeypatch, archived(served, url, members), "enwik8")
    with pytest.raises(TextError, match="cannot fetch enwik8"):
        load_corpus("enwik8")
    assert not (own_folders / "enwik8" / "enwik8").exists()


def test_a_redirect_away_from_https_is_refused():
    import requests

    response = requests.Response()
    response.url, response.status_code = "https://example.org/a", 302
    response.headers["location"] = "http://example.org/a"
    with pytest.raises(ValueError, match="not https"):
        refuse_downgrade(response)
    for allowed in ("https://example.net/b", "/b"):
        response.headers["location"] = allowed
        refuse_downgrade(response)


def test_the_pins_of_the_public_corpora():
    for source in downloads.SOURCES.values():
        assert source.url.startswith("https://")
        assert source.digest.startswith("sha256:") or source.archive_digest.startswith("sha256:")
    tiny = downloads.SOURCES["tiny-shakespeare"]
    assert tiny.size == 1_115_394
    assert tiny.digest.endswith("86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")


def test_without_a_network_the_default_is_python_docs_and_says_so(monkeypatch: pytest.MonkeyPatch):
    pin(monkeypatch, nowhere())
    corpus = default_corpus()
    assert corpus.name == "python-docs"
    assert "tiny-shakespeare" in corpus.note and corpus.to_dict()["note"] == corpus.note


def test_the_default_does_not_wait_for_a_silent_network(monkeypatch: pytest.MonkeyPatch):
    import threading

    released = threading.Event()
    monkeypatch.setattr(downloads, "_fetch", lambda *_: released.wait(30))
    corpus = default_corpus(patience=0.05)
    released.set()
    assert corpus.name == "python-docs" and "did not arrive within 0.05 s" in corpus.note


def test_importing_fetches_nothing():
    program = (
        "import socket, sys\n"
        "def refuse(*_, **__): raise AssertionError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "import postil.text, postil.text.windows\n"
        "assert 'requests' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.case("BC134")
@pytest.mark.parametrize("name", ["../x", "a/../../x"])
def test_a_corpus_name_with_dots_is_only_ever_a_path_to_read(name: str, own_folders: Path):
    with pytest.raises(TextError, match="cannot read the text"):
        load_corpus(name)
    assert not own_folders.exists()


def test_the_real_tiny_shakespeare_where_it_is_at_hand(monkeypatch: pytest.MonkeyPatch):
    if not Path(DATA, "tiny-shakespeare", "input.txt").is_file():
        pytest.skip("Tiny Shakespeare is not at hand: name its folder in POSTIL_DATA")
    monkeypatch.setattr(corpora, "fetch", None)
    corpus = load_corpus("tiny-shakespeare", data_dir=DATA)
    assert corpus.size == 1_115_394 and len(set(whole(corpus))) == 65
