# ruff: noqa: E501  (payloads and programs in strings are read whole)
import pytest

from postil.pages.notes import Note, front_matter, note_of, sections

from .making import page_of, rows_of


def notes(text: str) -> list[str]:
    source, rows = rows_of(text)
    return [note.text for row in rows for note in note_of(source, row)]


@pytest.mark.case("BC125")
@pytest.mark.parametrize("prefix", ["", "r"])
def test_a_docstring_is_shown_as_typed(prefix):
    text = f'{prefix}"""Title.\n\n$\\theta \\nabla \\frac{{a}}{{b}}$ and \\begin{{x}}\n"""\n'
    (note,) = notes(text)
    assert "$\\theta \\nabla \\frac{a}{b}$ and \\begin{x}" in note
    assert not any(ord(c) < 32 and c != "\n" for c in note)


@pytest.mark.case("BC125")
def test_a_backslash_without_the_raw_prefix_is_reported(tmp_path):
    page = page_of(tmp_path, '"""Title."""\n\n\ndef f():\n    """$\\theta$"""\n')
    (fault,) = page.faults
    assert (fault.path, fault.line, fault.is_warning) == ("pkg/one.py", 5, True)
    assert "raw" in fault.message
    assert page_of(tmp_path / "raw", 'r"""$\\theta$"""\n').faults == ()


def test_a_doubled_backslash_without_the_raw_prefix_is_one_command():
    assert notes('"""$\\\\theta$ and a row end \\\\\n"""\n') == ["$\\theta$ and a row end \\\\"]


def test_adjacent_literals_are_joined():
    assert notes("'one ' \"two\"\nx = 1\n") == ["one two"]


def test_indentation_goes_and_keeps_what_is_relative():
    assert notes('def f():\n    """One.\n\n        code\n    two\n    """\n') == ["One.\n\n    code\ntwo"]
    assert notes("if x:\n    # one\n    #   two\n    pass\n") == ["one\n  two"]


def test_sections_keep_their_lines():
    found = sections(
        Note(
            "Prose.\n\nRaises:\n    ValueError: one\n        more.\n    KeyError: two.\n\nSource: [a1], Eq. 2",
            10,
        )
    )
    assert [(s.label, [(i.term, i.note.text, i.note.line) for i in s.items]) for s in found] == [
        ("", [("", "Prose.\n", 10)]),
        ("Raises", [("ValueError", "one\nmore.", 13), ("KeyError", "two.", 15)]),
        ("Source", [("", "[a1], Eq. 2", 17)]),
    ]


def test_labels_on_one_line_are_parted():
    found = sections(Note("Source: [a1], Eq. 1. Deviation: none. Cost: $T$.", 1))
    assert [(s.label, s.items[0].note.text) for s in found] == [
        ("Source", "[a1], Eq. 1."), ("Deviation", "none."), ("Cost", "$T$.")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["A Note: this is prose.", "One line\nNote: in a paragraph.", "```\nRaises:\n    x: y\n```"]
)
def test_what_only_looks_like_a_label_is_prose(text):
    assert [s.label for s in sections(Note(text, 1))] == [""]


def test_front_matter():
    text = "Masks: who may read whom.\n\nProse.\n\n:paper: a1, b2\n:terms:\n    K: key, exp_key\n    $W_Q$: query"
    front, rest = front_matter(Note(text, 1))
    assert (front.title, front.description) == ("Masks", "who may read whom")
    assert front.papers == ("a1", "b2")
    assert front.terms == (("K", ("key", "exp_key")), ("W_Q", ("query",)))
    assert rest is not None and rest.text.strip() == "Prose."


@pytest.mark.parametrize(
    ("text", "title"),
    [("Read a file.", "Read a file"), ("Two\nlines.", ""), ("", ""), ("A.\n\n:title: B", "B")],
)
def test_titles(text, title):
    assert front_matter(Note(text, 1))[0].title == title
