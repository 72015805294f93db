# ruff: noqa: E501  (payloads and programs in strings are read whole)
import re
import sys

import pytest

from postil.pages.notes import Note
from postil.pages.prose import Reference, inline_html, inline_text, is_safe_link, messages, plain_text

from .making import html_of


@pytest.mark.case("BC123")
@pytest.mark.parametrize("frame", ["${}$", "$$\n{}\n$$", "a ${}$ b *c* ${}$"])
def test_no_emphasis_inside_formulas(frame):
    formula = r"q_{a,b} * \sum_{i} w_i * x_i"
    rendered, faults = html_of(frame.replace("{}", formula))
    assert not faults
    assert "<math" in rendered
    assert re.findall(r"</?em>|</?strong>", rendered) == (["<em>", "</em>"] if "*c*" in frame else [])


@pytest.mark.case("BC126")
def test_row_ends_and_comparisons_arrive_unchanged():
    rendered, faults = html_of("\\begin{align}\na &= b \\\\\nc &< d\n\\end{align}")
    assert not faults
    assert rendered.count("<mtr>") == 2
    assert "<mo>&lt;</mo>" in rendered and "&amp;lt;" not in rendered
    assert 'alttext="\\begin{align*} a &amp;= b \\\\ c &amp;&lt; d \\end{align*}"' in rendered
    rendered, _ = html_of("$a < b$ and $c > d$")
    assert "<mo>&lt;</mo>" in rendered and "<mo>&gt;</mo>" in rendered


@pytest.mark.case("BC127")
@pytest.mark.parametrize(
    "payload",
    ["<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<svg/onload=alert(1)>", "a <b>c</b>", "&#60;script&#62;", "<!-- x -->"],
)  # fmt: skip
def test_raw_html_is_text(payload):
    rendered, _ = html_of(payload)
    assert not re.search(r"<(script|img|svg|b|!)", rendered)
    assert "&lt;" in rendered or "&amp;#60;" in rendered


@pytest.mark.case("BC128")
@pytest.mark.parametrize(
    "url",
    ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "java\tscript:alert(1)", " javascript:alert(1)", "&#106;avascript:alert(1)",
     "data:text/html,<script>alert(1)</script>", "vbscript:x", "file:///etc/passwd", "//evil.example/x", "\\\\evil.example",
     "javascript&colon;alert(1)", "\x01javascript:alert(1)", "java\u200bscript:alert(1)", "blob:x", "https:///x"],
)  # fmt: skip
def test_other_schemes_are_no_links(url):
    assert not is_safe_link(url)
    for markdown in (
        f"[text]({url})",
        f"[text](<{url}>)",
        f"<{url}>",
        f"[text][r]\n\n[r]: {url}",
        f"![x]({url})",
    ):
        rendered, _ = html_of(markdown)
        assert not re.search(r'(href|src)="(?!https?:|mailto:|#|%5C)', rendered), rendered


@pytest.mark.case("BC128")
@pytest.mark.parametrize(
    "url",
    ["https://a.example/b?c=d", "http://a.example", "mailto:a@b.example", "other.py#x", "../a.py", "#here"],
)
def test_ordinary_links_are_links(url):
    assert is_safe_link(url)
    assert f'href="{url}"' in html_of(f"[text]({url})")[0]


def test_a_formula_that_cannot_be_set_is_reported_with_its_line():
    rendered, faults = html_of("One.\n\nTwo $\\frac{a$ three.")
    assert "\\frac{a" in rendered
    ((line, message),) = faults
    assert line == 3 and "mathematics" in message and "\\frac{a" in message


@pytest.mark.parametrize("text", ["costs $5 and $6 more", "$HOME and $PATH is", "a$b", r"\$x\$", "`$x$`"])
def test_dollars_that_are_no_formulas(text):
    rendered, faults = html_of(text)
    assert "<math" not in rendered and not faults


def test_a_tagged_equation_can_be_linked():
    rendered, faults = html_of("See [it](#eq-1).\n\n$$x = 1 \\tag{1}$$")
    assert 'id="eq-1"' in rendered and 'href="#eq-1"' in rendered and "(1)" in rendered and not faults


def test_a_paper_is_cited_by_its_key():
    rendered, _ = html_of(
        "As in [a2017], Eq. 1.", references={"a2017": Reference("https://p.example", "A <title>", "A 2017")}
    )
    assert '<a href="https://p.example" title="A &lt;title&gt;">A 2017</a>, Eq. 1.' in rendered


def test_an_untranslated_block_is_marked_as_english():
    known = {"One.": "壱。", "cell": "欄"}
    rendered, _ = html_of(
        "One.\n\nTwo.\n\n- Three.\n\n| cell | head |\n|---|---|\n| a1 | cell |", translate=known.get
    )
    assert "<p>壱。</p>" in rendered
    assert '<p lang="en" class="untranslated">Two.</p>' in rendered
    assert '<li lang="en" class="untranslated">Three.</li>' in rendered
    assert "<th>欄</th>" in rendered and '<th lang="en" class="untranslated">head</th>' in rendered


def test_messages_are_blocks_and_keep_their_lines():
    note = Note(
        "# Head\n\nOne\ntwo `x`.\n\n- Item.\n\n| a cell | $x$ |\n|---|---|\n| `y` | other |\n\n```\ncode\n```\n\n$$x$$",
        5,
    )
    assert list(messages(note)) == [
        ("Head", 5),
        ("One two `x`.", 7),
        ("Item.", 10),
        ("a cell", 12),
        ("other", 14),
    ]


def test_plain_text_is_in_the_language():
    assert plain_text(Note("One `x` *two*.\n\nThree.", 1), {"Three.": "参。"}.get) == "One x two. 参。"


def test_a_title_is_one_line_of_markdown():
    title = "The `mask` of $x^2$, see [there](javascript:x) and [here](a.py) <b>"
    shown = inline_html(title)
    assert '<code translate="no">mask</code>' in shown and "<msup>" in shown
    assert "href" not in shown and "<b>" not in shown
    assert inline_text(title) == "The mask of x^2, see [there](javascript:x) and here <b>"


def test_headings_get_ids_of_their_own():
    taken: list[str] = []

    def anchor(text):
        taken.append(text)
        return f"{text}-{len(taken)}"

    rendered, _ = html_of("## Same\n\n## Same", anchor=anchor)
    assert 'id="same-1"' in rendered and 'id="same-2"' in rendered


def test_a_picture_from_elsewhere_is_a_link():
    assert "<img" not in html_of("![a](https://x.example/a.png)")[0]


@pytest.mark.parametrize(
    "text",
    ["[" * 5000 + "](x)" * 5000, "*" * 5000 + "a", "`" * 5000, "> " * 2000 + "a", "$" * 5001, "| a " * 3000],
)
def test_odd_markdown_ends(text):
    html_of(text)


def steps(text: str) -> int:
    """How many lines of Python run to render a note: a clock that every machine agrees on."""
    count = 0

    def watch(frame, event, argument):
        nonlocal count
        count += 1
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        html_of(text)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("piece", ["`x` ", "$x$ ", "*x ", "[a](", "word\n", "- a\n", "\\begin{align}\n"])
def test_work_grows_like_the_note(piece):
    assert steps(piece * 600) <= 2.3 * steps(piece * 300)
