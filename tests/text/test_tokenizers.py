from __future__ import annotations

import json
import math
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postil.text.byte_pairs import BytePairs
from postil.text.characters import Bytes, Characters
from postil.text.corpora import load_corpus
from postil.text.reading import TextError, clean_text
from postil.text.tokenizer import Tokenizer, fingerprint, token_dtype
from postil.text.tokenizers import TOKENIZERS, build_tokenizer, tokenizer_from_dict
from postil.text.words import Words

SAMPLE = (
    "It is said: the cat's hat (and the dog's) isn't here.\nNaïve café, 漢字とかな, 😀👍🏽!\n\n"
    "  The thing 42 the thing 42 the thing\t_x_ “quoted” O'Neill\n"
) * 3
LETTERS = "abc it's the THE.,!?\n\t 漢😀é0"
pytest.importorskip("tokenizers")


def make(kind: str) -> Tokenizer:
    if kind == "bytes":
        return Bytes()
    learn = {"characters": Characters.of, "words": Words.of, "bpe": lambda chunks: BytePairs.of(chunks, 320)}
    return learn[kind]([SAMPLE + LETTERS])


MADE = {kind: make(kind) for kind in TOKENIZERS}
every_kind = pytest.mark.parametrize("kind", TOKENIZERS)
lossless = pytest.mark.parametrize("kind", ["characters", "bytes", "bpe"])


def cut(data, size):
    return [data[start : start + size] for start in range(0, len(data), size)]


def streamed(tokenizer: Tokenizer, ids) -> str:
    stream = tokenizer.stream()
    return "".join(stream.feed(int(token)) for token in ids) + stream.flush()


@lossless
@given(text=st.text(st.sampled_from(LETTERS)))
def test_decoding_gives_the_text_back(kind: str, text: str):
    assert MADE[kind].decode(MADE[kind].encode(text)) == text


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_and_byte_pairs_know_every_text(text: str):
    assert MADE["bytes"].decode(MADE["bytes"].encode(text)) == text
    assert MADE["bpe"].decode(MADE["bpe"].encode(text)) == clean_text(text)


@every_kind
@given(text=st.text(st.sampled_from(LETTERS)), size=st.integers(1, 9))
def test_encoding_does_not_depend_on_the_chunks(kind: str, text: str, size: int):
    tokenizer = Words.of([text + "."]) if kind == "words" else MADE[kind]
    chunks = cut(text.encode() if tokenizer.reads_bytes else text, size)
    parts = list(tokenizer.encode_stream(chunks))
    assert [token for part in parts for token in part.tolist()] == tokenizer.encode(text).tolist()
    assert all(part.dtype == token_dtype(tokenizer.vocab_size) for part in parts)


# A long run without a blank is where a byte-pair stream could be cut wrongly.
@given(st.lists(st.sampled_from(["aaab", "the", " the", "\n\n", "  ", "'s", "漢字", "42"]), max_size=40))
@settings(max_examples=50)
def test_byte_pairs_agree_with_one_call_of_the_package(words: list[str]):
    text, tokenizer = "".join(words), MADE["bpe"]
    whole = tokenizer._model.encode(text).ids  # pyright: ignore
    assert np.concatenate([[], *tokenizer.encode_stream(cut(text, 3))]).tolist() == whole


@pytest.mark.case("BC084")
@every_kind
@given(data=st.data())
def test_a_stream_equals_decoding_at_once(kind: str, data: st.DataObject):
    tokenizer = MADE[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.case("BC084")
def test_a_character_comes_out_with_its_last_byte():
    stream = Bytes().stream()
    assert [stream.feed(byte) for byte in "a😀漢".encode()] == ["a", "", "", "", "😀", "", "", "漢"]
    assert stream.flush() == ""


@pytest.mark.case("BC085")
@pytest.mark.parametrize("kept", [1, 2, 3])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_half_a_character_at_the_end_is_one_replacement_mark(kind: str, kept: int):
    tokenizer = MADE[kind]
    half = list(b"ok \xf0\x9f\x98\x80"[: 3 + kept])
    stream = tokenizer.stream()
    assert "".join(stream.feed(token) for token in half) == "ok "
    assert stream.flush() == "\ufffd" and stream.flush() == ""
    assert tokenizer.decode(half) == "ok \ufffd"


@pytest.mark.case("BC075")
@pytest.mark.case("BC076")
@pytest.mark.parametrize("kind", ["characters", "words", "bpe"])
def test_a_prompt_is_read_as_the_training_text_is(kind: str, tmp_path: Path):
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfto be\r\nor not\r")
    tokenizer = build_tokenizer(kind, load_corpus(str(path)))
    plain = tokenizer.encode("to be\nor not\n").tolist()
    assert tokenizer.encode("\ufeffto be\r\nor not\r").tolist() == plain
    assert np.concatenate(list(tokenizer.encode_stream(load_corpus(str(path)).read()))).tolist() == plain
    assert "\ufeff" not in json.dumps(
        tokenizer.to_dict(), ensure_ascii=False
    ) and "\r" not in tokenizer.decode(plain)


@pytest.mark.case("BC079")
def test_an_unknown_character_is_named_with_its_place_and_what_is_allowed():
    tokenizer = Characters("\n abc")
    with pytest.raises(TextError) as caught:
        tokenizer.encode("ab é ca")
    message = str(caught.value)
    assert "'é' (U+00E9) at position 3 " in message and "these 5" in message and r"'\n abc'" in message
    assert "\n" not in message
    with pytest.raises(TextError, match="position 7 "):
        list(tokenizer.encode_stream(["abc", "abc", "a\x1b"]))


@pytest.mark.case("BC079")
def test_an_unknown_word_is_an_error_or_the_unknown_symbol():
    known = Words.of(["the cat sat"])
    with pytest.raises(TextError, match=r"'cats' \(U\+0063 .*position 1 .*'cat'"):
        known.encode("the cats sat")
    limited = Words.of(["the cat the cat the cat sat down"], vocab_size=3)
    assert limited.words == ["<unk>", "cat", "the"]
    assert limited.encode("The dog sat").tolist() == [2, 0, 0] and limited.decode([2, 0]) == "the <unk>"


def test_words_are_lower_case_and_spaced_as_printed():
    text = "The  cat (isn't) here, is it?\n“Yes,”\tsaid 42."
    tokenizer = Words.of([text])
    assert tokenizer.decode(tokenizer.encode(text)) == "the cat (isn't) here, is it?\n“yes,” said 42."
    assert Words.of(["b a a"]).words == ["a", "b"]


@given(st.text(max_size=60))
def test_words_come_back_as_the_same_words(text: str):
    tokenizer = Words.of([clean_text(text) + "."])
    found = tokenizer.encode(text).tolist()
    assert tokenizer.encode(tokenizer.decode(found)).tolist() == found


@every_kind
def test_a_token_out_of_range_is_an_error(kind: str):
    tokenizer = MADE[kind]
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(TextError, match=f"token {token} "):
            tokenizer.decode([token])
        with pytest.raises(TextError, match=f"token {token} "):
            tokenizer.stream().feed(token)


@every_kind
def test_nothing_encodes_to_nothing(kind: str):
    ids = MADE[kind].encode("")
    assert ids.size == 0 and MADE[kind].decode(ids) == ""


# What is stored


@every_kind
def test_a_stored_tokenizer_is_the_same_tokenizer(kind: str):
    tokenizer = MADE[kind]
    again = tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert fingerprint(again) == fingerprint(tokenizer) and again.vocab_size == tokenizer.vocab_size
    assert again.encode(SAMPLE).tolist() == tokenizer.encode(SAMPLE).tolist()


def test_fingerprints_tell_tokenizers_apart():
    prints = [fingerprint(tokenizer) for tokenizer in MADE.values()]
    assert len({*prints, fingerprint(Characters("ab")), fingerprint(Characters("ba"))}) == 6


@pytest.mark.parametrize(
    "description",
    [
        None,
        [],
        {"format": 2, "kind": "bytes"},
        {"format": 1, "kind": "pickle"},
        {"format": 1, "kind": ["bytes"]},
        {"format": 1, "kind": "bytes", "path": "../../etc/hostname"},
        {"format": 1, "kind": "characters"},
        {"format": 1, "kind": "characters", "alphabet": ["a"]},
        {"format": 1, "kind": "characters", "alphabet": ""},
        {"format": 1, "kind": "characters", "alphabet": "aa"},
        {"format": 1, "kind": "characters", "alphabet": "a\ud800"},
        {"format": 1, "kind": "words", "words": "abc"},
        {"format": 1, "kind": "words", "words": ["two words"]},
        {"format": 1, "kind": "words", "words": ["a", 1]},
        {"format": 1, "kind": "words", "words": ["a", "a"]},
        {"format": 1, "kind": "bpe", "merges": [[0]]},
        {"format": 1, "kind": "bpe", "merges": [[0, 256]]},
        {"format": 1, "kind": "bpe", "merges": [[0, -1]]},
        {"format": 1, "kind": "bpe", "merges": [[0, True]]},
        {"format": 1, "kind": "bpe", "merges": [[0, 0], *([n, n] for n in range(256, 320))]},
    ],
)
def test_a_description_that_is_not_ours_is_refused(description):
    with pytest.raises(TextError):
        tokenizer_from_dict(description)


def test_byte_pairs_are_learned_alike_every_time():
    assert MADE["bpe"].to_dict() == make("bpe").to_dict()
    assert 256 < MADE["bpe"].vocab_size <= 320
    assert len(MADE["bpe"].encode("the thing")) < 5


def test_two_merges_may_spell_one_token():
    tokenizer = BytePairs([(98, 99), (97, 256), (97, 98), (258, 99)])
    assert tokenizer.vocab_size == 259 and tokenizer.decode(tokenizer.encode("abc")) == "abc"


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_half_a_surrogate_pair_is_not_text(kind: str):
    with pytest.raises(TextError, match=r"U\+D800\) at position 2"):
        MADE[kind].encode("ab\ud800")


def test_bytes_that_a_command_line_smuggled_in_come_out_again():
    assert Bytes().encode(b"a\xff".decode("utf-8", "surrogateescape")).tolist() == [97, 255]


def test_without_the_package_byte_pairs_say_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TextError, match=r"postil\[bpe\]"):
        BytePairs.of(["text"])


@pytest.mark.parametrize(
    ("kind", "vocab_size", "match"),
    [
        ("letters", None, "'letters' does not exist"),
        ("bytes", 9, "leave it out"),
        ("words", 1, "at least 2"),
        ("bpe", 255, "256"),
    ],
)
def test_a_tokenizer_that_cannot_be_made(kind: str, vocab_size: int | None, match: str):
    with pytest.raises(TextError, match=match):
        build_tokenizer(kind, load_corpus("python-docs"), vocab_size=vocab_size)


# What a loss means


@lossless
def test_units_count_the_text_that_the_tokens_stand_for(kind: str):
    tokenizer = MADE[kind]
    ids = tokenizer.encode(SAMPLE)
    units = tokenizer.measure(iter(cut(ids, 7)))
    assert units == (len(ids), len(SAMPLE), len(SAMPLE.encode()))
    assert units.bits_per_character(math.log(2)) == pytest.approx(len(ids) / len(SAMPLE))
    assert units.bits_per_byte(math.log(2)) == pytest.approx(len(ids) / len(SAMPLE.encode()))


def test_units_of_words_count_the_decoded_text():
    tokenizer = MADE["words"]
    ids = tokenizer.encode(SAMPLE)
    text = tokenizer.decode(ids)
    assert tokenizer.measure(iter(cut(ids, 7))) == (len(ids), len(text), len(text.encode()))


@every_kind
def test_every_token_has_a_printable_name(kind: str):
    tokenizer = MADE[kind]
    names = [tokenizer.symbol(token) for token in range(tokenizer.vocab_size)]
    assert all(name.isprintable() for name in names) and len(set(names)) == len(names)


@pytest.mark.case("BC089")
@pytest.mark.parametrize("kind", ["characters", "bytes", "words"])
def test_one_huge_line_is_encoded_in_constant_memory(kind: str):
    tokenizer = MADE[kind]
    block = "the cat's " * (1 << 15)

    def peak(blocks: int) -> int:
        tracemalloc.start()
        for _ in tokenizer.encode_stream(block for _ in range(blocks)):
            pass
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    assert peak(8) < 1.25 * peak(2)
