# ruff: noqa: E501  (payloads and programs in strings are read whole)
import ast
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postil.pages import interface
from postil.pages.highlight import code_lines
from postil.pages.project import Module, Project
from postil.pages.prose import Context
from postil.pages.reading import read_page
from postil.pages.rows import Writer
from postil.pages.source import SourceError, parse, read_source, split

from .making import kinds_of, rows_of
from .recovering import taken_apart

STANDARD_LIBRARY = Path(ast.__file__).parent
OURS = Path(__file__).parents[2] / "src" / "postil"


def assert_law(file: Path) -> bool:
    """Every line in one row, in order; code taken back from the page is the same program."""
    module = Module(file, file.name, file.stem, f"{file.stem}.html")
    page = read_page(Project(file.parent, file.parent, "law", (module,)), module)
    if page.source is None:
        return False
    writer = Writer(page, Context(), interface.words("en"), code_lines(page.source, {}), {}, {})
    spans, numbers, code = taken_apart(writer.rows("", []))
    assert [n for first, last in spans for n in range(first, last + 1)] == list(
        range(1, len(page.source.lines) + 1)
    )
    assert numbers == sorted(set(numbers))
    assert ast.dump(ast.parse(code)) == ast.dump(page.source.tree), file
    parts = [n for row in split(page.source) for part in row.parts for n in range(part.first, part.last + 1)]
    assert parts == list(range(1, len(page.source.lines) + 1))
    return True


def installed(*packages: str) -> list[Path]:
    """Files of installed packages."""
    import importlib.util

    files = []
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            pytest.skip(f"{package} is not installed")
        files += sorted(Path(spec.origin).parent.rglob("*.py"))
    return files


def test_law_on_our_source():
    assert sum(assert_law(file) for file in sorted(OURS.rglob("*.py"))) > 20


# A sample of every size and age; the whole library is the slow test below.
@pytest.mark.parametrize(
    "name",
    ["ast.py", "argparse.py", "dataclasses.py", "this.py", "typing.py", "inspect.py", "textwrap.py", "antigravity.py",
     "turtle.py", "tokenize.py", "json/decoder.py", "xml/dom/minidom.py", "asyncio/base_events.py"],
)  # fmt: skip
def test_law_on_the_standard_library(name):
    assert assert_law(STANDARD_LIBRARY / name)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_law_on_the_whole_standard_library():
    files = [f for f in sorted(STANDARD_LIBRARY.rglob("*.py")) if "site-packages" not in f.parts]
    assert sum(map(assert_law, files)) > 500


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_law_on_installed_packages():
    assert sum(map(assert_law, installed("pygments", "jinja2", "markdown_it", "hypothesis", "numpy"))) > 500


@pytest.mark.case("BC113")
def test_a_docstring_that_ends_on_its_last_text_line():
    text = 'def f():\n    """First line.\n    Last line."""\n    x = 1\n    return x\n'
    assert kinds_of(text) == ["code", "docstring", "docstring", "code", "code"]


@pytest.mark.case("BC114")
def test_a_triple_quoted_assignment_is_code():
    text = 'TEXT = """\n# not a note\n"""\nx = 1\n"""a string after an assignment"""\n'
    assert set(kinds_of(text)) == {"code"}


@pytest.mark.case("BC115")
@pytest.mark.parametrize(
    "docstring",
    ["'''Single.'''", "'One line.'", 'r"""Raw \\theta."""', 'R"Raw."', '"Two " "literals."', '"""Two."""  # with a comment', '("in brackets")'],
)  # fmt: skip
def test_what_ast_calls_a_docstring_is_one(docstring):
    text = f"class A:\n    {docstring}\n    x = 1\n"
    assert kinds_of(text) == ["code", "docstring", "code"]
    assert kinds_of(f"{docstring}\nx = 1\n") == ["docstring", "code"]


@pytest.mark.parametrize("text", ['def f(): "short"\n', '"note"; x = 1\n', 'f"not {1}"\n', 'b"bytes"\n'])
def test_a_string_that_shares_its_line_or_is_none_stays_code(text):
    assert set(kinds_of(text)) == {"code"}


@pytest.mark.case("BC116")
def test_a_hash_inside_a_string_starts_no_comment():
    text = 'a = "http://x/#y"  # trailing\nb = re.compile(r"#+")  # trailing\nc = """\n# inside\n"""\n# a note\nd = "#fff"\n'
    assert kinds_of(text) == ["code", "code", "code", "code", "code", "comment", "code"]


@pytest.mark.case("BC117")
def test_decorators_stay_with_their_function():
    text = (
        "x = 1\n# about A\n@one\n# between\n@two(\n    3,  # three\n)\nclass A:\n    @a\n    @b(\n        1,\n    )\n"
        "    # still between\n    @c\n    def f(self):\n        '''Doc.'''\n        return 1\n\n    y = 2\n"
    )
    source, rows = rows_of(text)
    assert [(row.first, row.last, row.name) for row in rows] == [
        (1, 1, ""),
        (2, 8, "A"),
        (9, 18, "A.f"),
        (19, 19, ""),
    ]
    assert kinds_of(text)[3] == kinds_of(text)[12] == "code"
    assert "between" in source.text(2, 8)


@pytest.mark.case("BC121")
def test_line_ends_are_those_of_python(tmp_path):
    text = (
        "import os\n\x0c\n# before\r\nx = 'a\u2028b\x0bc\x1cd'\r\n\ty = 1\n".replace("\ty", "y")
        + f"long = '{'x' * 5000}'\r\ndef f(a):\n\t# type: (int) -> int\n\treturn a\n\n\nclass A:\n    # what b is\n"
        + "    b: int = 1  # type: ignore\n    c = 2"
    )
    file = tmp_path / "odd.py"
    file.write_bytes(text.encode())
    assert assert_law(file)
    source = read_source(file)
    assert source.lines[3] == "x = 'a\u2028b\x0bc\x1cd'"
    assert source.lines[-1] == "    c = 2"


def test_a_declared_encoding_is_used(tmp_path):
    file = tmp_path / "latin.py"
    file.write_bytes("# -*- coding: latin-1 -*-\n# Émile\nx = 'é'\n".encode("latin-1"))
    assert read_source(file).lines[2] == "x = 'é'"
    assert assert_law(file)


@pytest.mark.parametrize(
    "text", ["", "\n", "\n\n\n", "# only a comment", '"""only a docstring"""', "x = 1 \\\n\n"]
)
def test_small_files(tmp_path, text):
    file = tmp_path / "small.py"
    file.write_text(text)
    assert assert_law(file)


@pytest.mark.parametrize(
    ("text", "line"),
    [("x = 1\ny = (\n", 2), ("def f(:\n", 1), ("x = 1\n  y = 2\n", 2), ("'unfinished\n", 1), ("a\x00b", 1)],
)
def test_an_error_names_file_and_line(tmp_path, text, line):
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(SourceError) as error:
        read_source(file, "pkg/broken.py")
    assert error.value.line in (line, line + 1)
    assert str(error.value).startswith("pkg/broken.py:")


@pytest.mark.parametrize(
    "text", ["(" * 5000 + ")" * 5000, "x = " + "[" * 5000, "not " * 200_000 + "x", "-" * 200_000 + "1"]
)
def test_deep_nesting_is_an_error_and_no_crash(text):
    with pytest.raises(SourceError):
        parse(text)


def test_bytes_that_are_not_text_are_an_error(tmp_path):
    file = tmp_path / "binary.py"
    file.write_bytes(b"\xff\xfe\x00x = 1")
    with pytest.raises(SourceError, match="not readable as text"):
        read_source(file)


def steps_for(text: str) -> int:
    """How many lines of Python run to cut a text: a clock that every machine agrees on."""
    count = 0

    def watch(frame, event, argument):
        nonlocal count
        count += 1
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        split(parse(text))
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    "piece",
    ["# a note\nx = 1\n\n", "def f():\n    '''Doc.'''\n    return 1\n\n", "x = [\n    1,  # one\n]\n", "@d\n@e\nclass A:\n    pass\n", "# note\n"],
)  # fmt: skip
def test_work_grows_like_the_file(piece):
    assert steps_for(piece * 400) <= 2.3 * steps_for(piece * 200)


def test_a_line_of_a_megabyte(tmp_path):
    file = tmp_path / "wide.py"
    file.write_text(
        f"# note\nx = '{'#' * 1_000_000}'\ny = [{'1, ' * 20_000}]\n# {'word ' * 200_000}\nz = 1\n"
    )
    assert assert_law(file)


STATEMENTS = st.sampled_from(
    ["x = 1", "# a note", "", "    ", "'''not # a docstring'''", "y = '''\n# text\n'''", "if x:\n    # inside\n    pass",
     "def f():\n    'doc'\n    # after\n    return 1", "class A:\n\n    # on b\n    b = 1\n\n    def c(self): pass",
     "@d\n# between\ndef g(a,\n      # in brackets\n      b): return a", "\x0c", "async def h():\n    r'''Raw.'''", "z = 1; # both"]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(STATEMENTS, max_size=12), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_law_on_made_programs(tmp_path_factory, statements, end, final):
    text = "\n".join(statements).replace("\n", end) + (end if final else "")
    file = tmp_path_factory.mktemp("made") / "made.py"
    file.write_bytes(text.encode())
    assert_law(file)


def test_a_comment_right_under_a_header_stays_with_it():
    _, rows = rows_of("def f():\n    # why\n    return 1\n")
    assert [(row.name, row.first, row.last) for row in rows] == [("f", 1, 3)]


def test_code_after_a_definition_is_a_row_of_its_own():
    _, rows = rows_of("def f():\n    return 1\n\n\nx = f()\n")
    assert [(row.name, row.first, row.last) for row in rows] == [("f", 1, 4), ("", 5, 5)]
