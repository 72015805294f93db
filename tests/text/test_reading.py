from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postil.text.reading import TextError, clean_text, decode_chunks, pieces


def cut(data, size):
    return [data[start : start + size] for start in range(0, len(data), size)]


@given(st.text(st.sampled_from("a\r\n\ufeffé漢😀 ")), st.integers(1, 9))
def test_reading_does_not_depend_on_the_chunks(text: str, size: int):
    assert "".join(decode_chunks(cut(text.encode(), size), "here")) == clean_text(text)


@pytest.mark.case("BC075")
def test_byte_order_mark_is_dropped_only_at_the_start():
    read = "".join(decode_chunks([b"\xef", b"\xbb\xbfab\xef\xbb\xbfc"], "here"))
    assert read == "ab\ufeffc"


@pytest.mark.case("BC076")
@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_every_line_ending_reads_as_one_newline(ending: str):
    text = ending.join(["To be,", "or not", "", "to be"]) + ending
    for size in (1, 2, 3, 100):
        assert "".join(decode_chunks(cut(text.encode(), size), "here")) == "To be,\nor not\n\nto be\n"
    assert clean_text(text) == "To be,\nor not\n\nto be\n"


def test_mixed_endings_and_other_separators():
    assert clean_text("a\r\nb\rc\nd\r\r\ne\u2028f\x0cg") == "a\nb\nc\nd\n\ne\u2028f\x0cg"


@pytest.mark.parametrize(
    ("data", "offset"),
    [
        (b"abc\xff", 3),
        (b"abc\xc3(", 3),
        (b"ab\xe6\xbc", 2),
        (b"\xed\xa0\x80", 0),
        (("é" * 5000).encode() + b"\x80", 10_000),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 4096])
def test_not_utf8_is_an_error_with_file_offset_and_remedy(data: bytes, offset: int, size: int):
    with pytest.raises(TextError) as caught:
        list(decode_chunks(cut(data, size), "'songs.txt'"))
    message = str(caught.value)
    assert "'songs.txt'" in message and f"byte offset {offset} " in message and "--tokenizer bytes" in message


def test_utf16_is_recognised():
    with pytest.raises(TextError, match="UTF-16"):
        list(decode_chunks(["To be".encode("utf-16")], "here"))


@given(st.text(st.sampled_from("ab \n\t\u3000.")), st.integers(1, 7), st.integers(1, 9))
def test_pieces_depend_on_the_text_alone(text: str, size: int, limit: int):
    whole = list(pieces([text], limit))
    assert list(pieces(cut(text, size), limit)) == whole
    assert "".join(whole) == text
    assert all(0 < len(piece) <= limit for piece in whole)


@given(
    st.lists(st.sampled_from(["to", "be", "or", ".", "not"]), min_size=1), st.sampled_from([" ", "\n", " \n"])
)
def test_pieces_end_at_word_boundaries_where_there_are_any(words: list[str], gap: str):
    for piece in pieces([gap.join(words)], limit=8):
        assert piece.split() == [word for word in piece.split() if word in {"to", "be", "or", ".", "not"}]


@pytest.mark.case("BC089")
@pytest.mark.parametrize("line", [b"a", b"ab ", "é漢".encode()], ids=["one word", "words", "beyond ASCII"])
def test_one_huge_line_is_read_in_constant_memory(line: bytes):
    def peak(megabytes: int) -> int:
        block = line * ((1 << 20) // len(line))
        tracemalloc.start()
        for _ in pieces(decode_chunks((block for _ in range(megabytes)), "here")):
            pass
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    assert peak(16) < 1.25 * peak(4)
