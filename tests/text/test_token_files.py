from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postil.text.corpora import Corpus, load_corpus
from postil.text.reading import TextError
from postil.text.token_files import (
    TokenFile,
    Tokens,
    count_tokens,
    encode_corpus,
    measure,
    open_tokens,
    split,
    unseen_symbols,
    write_tokens,
)
from postil.text.tokenizer import token_dtype
from postil.text.tokenizers import build_tokenizer

DATA = os.environ.get("POSTIL_DATA", "")


def corpus_of(tmp_path: Path, text: str | bytes, name: str = "text.txt") -> Corpus:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_corpus(str(path))


def tokens_of(tmp_path: Path, ids, vocab_size: int = 256, name: str = "ids.bin") -> Tokens:
    return write_tokens(tmp_path / name, [np.array(ids)], vocab_size)


def whole(tokens: Tokens) -> list[int]:
    return [token for chunk in tokens.chunks(7) for token in chunk.tolist()]


@pytest.mark.parametrize(
    ("vocab_size", "width"), [(2, 1), (256, 1), (257, 2), (65_536, 2), (65_537, 4), (1_114_112, 4)]
)
def test_the_smallest_type_that_fits(vocab_size: int, width: int, tmp_path: Path):
    ids = [0, vocab_size - 1, 1]
    tokens = tokens_of(tmp_path, ids, vocab_size)
    assert token_dtype(vocab_size).itemsize == width
    assert (tmp_path / "ids.bin").stat().st_size == 3 * width
    assert whole(tokens) == ids
    assert json.loads((tmp_path / "ids.json").read_text())["dtype"] == f"uint{8 * width}"


@pytest.mark.parametrize("kind", ["characters", "bytes", "words"])
def test_a_corpus_is_encoded_once_and_found_again(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    corpus = corpus_of(tmp_path, "To be, or not\r\nto bé.\n")
    tokenizer = build_tokenizer(kind, corpus)
    tokens = encode_corpus(corpus, tokenizer)
    expected = tokenizer.encode(corpus.paths[0].read_bytes().decode())
    assert whole(tokens) == expected.tolist()
    monkeypatch.setattr(type(tokenizer), "encode_stream", None)
    assert encode_corpus(corpus, tokenizer).file.path == tokens.file.path


def test_another_text_or_tokenizer_has_another_file(tmp_path: Path):
    first, second = corpus_of(tmp_path, "abc", "a"), corpus_of(tmp_path, "abcd", "b")
    letters, codes = build_tokenizer("characters", second), build_tokenizer("bytes")
    paths = {encode_corpus(c, t).file.path for c in (first, second) for t in (letters, codes)}
    assert len(paths) == 4
    path = encode_corpus(first, letters).file.path
    with pytest.raises(TextError, match="another corpus"):
        open_tokens(path, corpus=second.sha256)
    with pytest.raises(TextError, match="another tokenizer"):
        open_tokens(path, tokenizer="0" * 64)


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


every_damage = pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_empty, Path.unlink])


@every_damage
@pytest.mark.parametrize("suffix", [".bin", ".json"])
def test_a_damaged_file_is_noticed_and_built_anew(damage, suffix: str, tmp_path: Path):
    corpus = corpus_of(tmp_path, "To be, or not to be. " * 20)
    tokenizer = build_tokenizer("characters", corpus)
    path = encode_corpus(corpus, tokenizer).file.path
    good = path.read_bytes(), path.with_suffix(".json").read_bytes()
    damage(path.with_suffix(suffix))
    with pytest.raises(TextError, match=path.stem):
        open_tokens(path, corpus=corpus.sha256)
    encode_corpus(corpus, tokenizer)
    assert good == (path.read_bytes(), path.with_suffix(".json").read_bytes())


# The clean error is the point: a memory map would die of a signal here.
@every_damage
def test_a_file_that_changes_under_a_run_is_a_clean_error(damage, tmp_path: Path):
    tokens = tokens_of(tmp_path, range(100))
    assert tokens.rows([90], 10).tolist() == [list(range(90, 100))]
    damage(tokens.file.path)
    with pytest.raises(TextError, match=r"ids\.bin"):
        tokens.rows([0], 10)


def test_a_file_cut_between_check_and_read_is_a_clean_error(tmp_path: Path):
    tokens = tokens_of(tmp_path, range(100))
    with tokens.file.open() as file:
        os.truncate(tokens.file.path, 50)
        with pytest.raises(TextError, match="ends after token 50"):
            tokens.file.read(file, 45, 10)


def test_a_file_rebuilt_by_another_process_stops_nobody(tmp_path: Path):
    tokens = tokens_of(tmp_path, range(100))
    os.utime(tokens.file.path, (0, 0))
    assert tokens.rows([1], 3).tolist() == [[1, 2, 3]]
    tokens_of(tmp_path, range(100))
    assert tokens.rows([1], 3).tolist() == [[1, 2, 3]]
    tokens_of(tmp_path, range(100, 200))
    with pytest.raises(TextError, match="SHA-256"):
        tokens.rows([1], 3)


@pytest.mark.case("BC134")
@pytest.mark.parametrize(
    "change",
    [
        {"file": "../../etc/hostname"},
        {"path": "/etc/hostname"},
        {"format": 2},
        {"dtype": "object"},
        {"dtype": "float64"},
        {"count": -1},
        {"count": 1 << 40},
        {"count": True},
        {"count": "3"},
        {"sha256": None},
    ],
)
def test_a_description_that_is_not_ours_is_refused(change: dict, tmp_path: Path):
    path = tokens_of(tmp_path, range(3)).file.path
    description = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps(description | change))
    with pytest.raises(TextError):
        open_tokens(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "[]", "null", "\x80", " " * (1 << 21)])
def test_a_description_that_is_no_description_is_refused(text: str, tmp_path: Path):
    path = tokens_of(tmp_path, range(3)).file.path
    path.with_suffix(".json").write_text(text, encoding="latin-1")
    with pytest.raises(TextError, match=r"ids\.json"):
        open_tokens(path)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path):
    for ids in ([0, 256], [-1, 0]):
        with pytest.raises(TextError, match="vocabulary of 256"):
            tokens_of(tmp_path, ids)
    assert list(tmp_path.iterdir()) == []


def test_an_encoding_that_fails_leaves_no_file(tmp_path: Path):
    corpus = corpus_of(tmp_path, b"good text" * 500 + b"\xff")
    tokenizer = build_tokenizer("characters", corpus_of(tmp_path, "godtex ", "other"))
    with pytest.raises(TextError, match="byte offset 4500"):
        encode_corpus(corpus, tokenizer, folder=tmp_path / "tokens")
    assert list((tmp_path / "tokens").iterdir()) == []


def test_rows_never_leave_their_part(tmp_path: Path):
    part = tokens_of(tmp_path, range(100)).part(10, 20)
    assert len(part) == 10 and whole(part) == list(range(10, 20))
    assert part.rows(np.array([0, 7]), 3).tolist() == [[10, 11, 12], [17, 18, 19]]
    for start in (-1, 8):
        with pytest.raises(TextError, match="do not exist: there are 10"):
            part.rows([start], 3)
    for span in ((-1, 3), (5, 11), (6, 5)):
        with pytest.raises(TextError, match="do not exist"):
            part.part(*span)


# Splits


def lengths(count: int, *args, **options) -> list[int]:
    # A split reads nothing, so it can be asked about files of any length.
    tokens = Tokens(TokenFile.__new__(TokenFile), 0, count)
    return [len(part) for part in split(tokens, *args, **options)]


def test_the_splits_of_the_public_corpora():
    assert lengths(1_115_394) == [1_003_854, 111_540]
    assert lengths(100_000_000, (0.9, 0.05, 0.05)) == [90_000_000, 5_000_000, 5_000_000]


@given(st.integers(0, 10**12), st.integers(1, 99))
def test_a_split_loses_nothing_and_is_exact(count: int, percent: int):
    first, second = lengths(count, (percent / 100, (100 - percent) / 100))
    assert first == count * percent // 100 and first + second == count


@pytest.mark.parametrize("shares", [(0.9, 0.2), (1.0, 0.0), (1.5, -0.5), ()])
def test_shares_that_make_no_whole(shares: tuple):
    with pytest.raises(TextError, match="together they must be 1"):
        lengths(100, shares)


@pytest.mark.case("BC087")
def test_a_text_shorter_than_a_window_names_both_numbers_and_the_smallest():
    with pytest.raises(TextError) as caught:
        lengths(10, seq_len=32)
    message = str(caught.value)
    assert (
        "10 tokens" in message and "seq_len=32" in message and "smallest usable text has 37 tokens" in message
    )
    assert lengths(37, seq_len=32) == [33, 4]
    with pytest.raises(TextError, match="37"):
        lengths(36, seq_len=32)


@given(st.integers(1, 200), st.integers(0, 300))
def test_the_smallest_usable_text_is_usable_and_the_smallest(seq_len: int, count: int):
    try:
        parts = lengths(count, seq_len=seq_len)
        assert parts[0] > seq_len and parts[1] >= 2
    except TextError as error:
        smallest = int(str(error).split("smallest usable text has ")[1].split()[0])
        assert smallest > count
        lengths(smallest, seq_len=seq_len)
        if smallest - 1 > count:
            with pytest.raises(TextError):
                lengths(smallest - 1, seq_len=seq_len)


# What a text holds


@pytest.mark.case("BC080")
def test_symbols_of_the_validation_text_unseen_in_training_are_counted(tmp_path: Path):
    training, validation = corpus_of(tmp_path, "abcabc\n", "a"), corpus_of(tmp_path, "abxyyé\n", "b")
    tokenizer = build_tokenizer("characters", training, validation)
    encoded = [encode_corpus(corpus, tokenizer) for corpus in (training, validation)]
    assert unseen_symbols(tokenizer, *encoded) == {"'x' (U+0078)": 1, "'y' (U+0079)": 2, "'é' (U+00E9)": 1}
    assert unseen_symbols(tokenizer, encoded[0], encoded[0]) == {}


def test_counts_and_units(tmp_path: Path):
    corpus = corpus_of(tmp_path, "aabé\n")
    tokenizer = build_tokenizer("characters", corpus)
    tokens = encode_corpus(corpus, tokenizer)
    assert count_tokens(tokens, tokenizer.vocab_size).tolist() == [1, 2, 1, 1]
    assert measure(tokenizer, tokens) == (5, 5, 6)
    assert measure(tokenizer, tokens.part(3, 5)) == (2, 2, 3)


def test_the_split_of_tiny_shakespeare_where_it_is_at_hand():
    if not Path(DATA, "tiny-shakespeare", "input.txt").is_file():
        pytest.skip("Tiny Shakespeare is not at hand: name its folder in POSTIL_DATA")
    corpus = load_corpus("tiny-shakespeare", data_dir=DATA)
    tokenizer = build_tokenizer("characters", corpus)
    training, validation = split(encode_corpus(corpus, tokenizer), seq_len=512)
    assert (tokenizer.vocab_size, len(training), len(validation)) == (65, 1_003_854, 111_540)
    assert unseen_symbols(tokenizer, training, validation) == {}


# Memory


def big_file(path: Path, megabytes: int) -> str:
    with path.open("wb") as file:
        for _ in range(megabytes):
            file.write(b"the cat's " * 104_857)
    return str(path)


@pytest.mark.case("BC089")
@pytest.mark.parametrize("kind", ["characters", "bytes"])
def test_memory_does_not_grow_with_the_text(kind: str, tmp_path: Path):
    def peak(megabytes: int) -> int:
        path = big_file(tmp_path / f"{megabytes}", megabytes)
        tracemalloc.start()
        corpus = load_corpus(path)
        tokenizer = build_tokenizer(kind, corpus)
        tokens = encode_corpus(corpus, tokenizer)
        measure(tokenizer, tokens)
        tokens.rows([0, len(tokens) - 65], 65)
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(1)
    assert peak(12) < 1.25 * peak(3)


PROGRAM = """
import resource, sys
from postil.text import build_tokenizer, encode_corpus, load_corpus, measure
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)
before = peak()
corpus = load_corpus(sys.argv[1])
tokenizer = build_tokenizer(sys.argv[2], corpus, **({'vocab_size': 300} if sys.argv[2] == 'bpe' else {}))
units = measure(tokenizer, encode_corpus(corpus, tokenizer))
print(units.tokens, units.bytes, peak() - before)
"""


# The case allows eight times the file. The memory needed is in truth that of a few chunks.
@pytest.mark.slow
@pytest.mark.case("BC089")
@pytest.mark.parametrize(
    ("kind", "megabytes"), [("characters", 200), ("bytes", 200), ("words", 200), ("bpe", 50)]
)
def test_two_hundred_megabytes_in_one_line(kind: str, megabytes: int, tmp_path: Path):
    path = big_file(tmp_path / "line", megabytes)
    size = Path(path).stat().st_size
    command = [sys.executable, "-c", PROGRAM, path, kind]
    tokens, text, peak = map(int, subprocess.run(command, capture_output=True, check=True).stdout.split())
    if kind != "words":
        assert text == size
    assert tokens > size // 10 and peak < 150e6
