# ruff: noqa: E501  (payloads and programs in strings are read whole)
import json
from pathlib import Path

import pytest

from postil.pages.figures import FigureError, heat_map, inline_svg, line_plot
from postil.pages.notebook import notebook_json
from postil.pages.project import open_project
from postil.pages.reading import read_page
from postil.pages.site import BuildError, build_site
from postil.pages.tracing import run_example

from .making import page_of, project_of

PAGE = '''r"""One: an outer product.

```python example T=3 D=5
import numpy as np
a = outer(np.arange(3.0), np.arange(5.0))
plots = {"Outer product": a, "First row": a[1]}
```
"""

import numpy as np


# A note.
def outer(x, y):
    """Multiply each by each."""
    z = x[:, None] * y[None, :]
    w: object = z.sum(0)
    del w
    return z


def broken():
    return None
'''


@pytest.fixture
def numpy_page(tmp_path):
    pytest.importorskip("numpy")
    return project_of(tmp_path, {"__init__.py": "", "one.py": PAGE})


def test_shapes_stand_beside_the_lines_that_make_them(numpy_page):
    page = next(read_page(numpy_page, m) for m in numpy_page.modules if m.path == "one.py")
    trace = run_example(numpy_page, page)
    assert trace.faults == []
    assert trace.shapes == {16: "[T, D]", 17: "[D]"}
    assert len(trace.plots["Outer product"]) == 3


def test_a_run_is_asked_for_and_kept(numpy_page, tmp_path):
    build_site(numpy_page, tmp_path / "site")
    assert "data-shape" not in (tmp_path / "site/one.html").read_text()
    build_site(numpy_page, tmp_path / "site", run=True)
    page = (tmp_path / "site/one.html").read_text()
    assert 'data-shape="[T, D]"' in page and "<figcaption>Outer product<span>□ 0 ■ 8</span>" in page
    # The second build takes the trace over: with Python out of reach it would fail.
    import postil.pages.tracing as tracing

    before = tracing._RUNNER
    try:
        tracing._RUNNER = "raise SystemExit('not to be run')"
        built = build_site(open_project(tmp_path / "pkg"), tmp_path / "site", run=True)
    finally:
        tracing._RUNNER = before
    assert built.written == 0 and (tmp_path / "site/one.html").read_text() == page


@pytest.mark.parametrize(
    ("code", "message"), [("1 / 0", "ZeroDivisionError"), ("import sys; sys.exit(3)", "exit status 3")]
)
def test_a_failing_example_ends_the_build(tmp_path, code, message):
    project = project_of(tmp_path, {"one.py": f'"""One.\n\n```python example\n{code}\n```\n"""\n'})
    with pytest.raises(BuildError, match=message):
        build_site(project, tmp_path / "site", run=True)


def test_an_example_that_never_ends_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("postil.pages.tracing.SECONDS", 1)
    project = project_of(tmp_path, {"one.py": '"""One.\n\n```python example\nwhile True: pass\n```\n"""\n'})
    trace = run_example(project, read_page(project, project.modules[0]))
    assert len(trace.faults) == 1


# --- notebooks ---


def test_a_notebook_holds_the_page_and_runs(tmp_path):
    text = 'r"""One: a title.\n\nProse $x$.\n"""\n\nimport math\n\n\n# About f.\ndef f(x):\n    r"""Double."""\n    # Inside.\n    return 2 * x\n\n\n# And then.\ny = f(math.pi)\n'
    page = page_of(tmp_path, text)
    notebook = (
        notebook_json(project_of(tmp_path, {}), page)
        if False
        else notebook_json(open_project(tmp_path / "pkg"), page)
    )
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.reads(notebook, as_version=4))
    cells = [(c["cell_type"], "".join(c["source"])) for c in json.loads(notebook)["cells"]]
    assert [kind for kind, _ in cells] == ["markdown", "code", "markdown", "code", "markdown", "code"]
    assert cells[0][1].startswith("# One\n\na title\n")
    assert cells[2][1] == "About f." and "# Inside." in cells[3][1]
    names: dict[str, object] = {}
    for kind, source in cells:
        if kind == "code":
            exec(source, names)
    assert names["y"] == pytest.approx(6.283185307)


def test_every_notebook_of_ours_is_valid(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    project = open_project(Path(__file__).parents[2] / "src/postil/pages")
    for module in project.modules:
        page = read_page(project, module)
        notebook = notebook_json(project, page)
        nbformat.validate(nbformat.reads(notebook, as_version=4))
        assert notebook == notebook_json(project, page)


# --- drawings ---


@pytest.mark.parametrize(
    "inner",
    ["<script>alert(1)</script>", '<path d="" onload="alert(1)"/>', "<foreignObject><body/></foreignObject>", '<image href="https://x.example/a"/>',
     '<a href="javascript:alert(1)"><path d=""/></a>', '<use href="https://x.example#a"/>', '<path d="" style="fill:url(https://x.example)"/>',
     '<style>@import "https://x.example"</style>', '<animate onbegin="alert(1)"/>', "<text>&lt;script&gt;</text>"],
)  # fmt: skip
def test_only_what_draws_gets_into_a_page(inner):
    drawn = inline_svg(
        f'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)">{inner}</svg>', '"<b>', "p"
    )
    assert "alert" not in drawn and "x.example" not in drawn and "<script" not in drawn
    assert 'aria-label="&quot;&lt;b&gt;"' in drawn


@pytest.mark.parametrize(
    "text",
    ["", "<svg/>", "not xml", '<!DOCTYPE x [<!ENTITY a "b">]><svg xmlns="http://www.w3.org/2000/svg"/>'],
)
def test_what_is_no_drawing_is_an_error(text):
    with pytest.raises(FigureError):
        inline_svg(text, "x", "p")


def test_ids_of_a_drawing_do_not_meet_those_of_the_page():
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><defs><path id="a" d=""/></defs><use href="#a"/><g clip-path="url(#a)"/></svg>'
    drawn = inline_svg(svg, "x", "p")
    assert 'id="p-a"' in drawn and 'href="#p-a"' in drawn and "url(#p-a)" in drawn


def test_an_axis_of_length_one_has_no_name(tmp_path):
    pytest.importorskip("numpy")
    text = PAGE.replace("T=3 D=5", "T=3 B=1").replace("np.arange(5.0)", "np.arange(1.0)")
    project = project_of(tmp_path, {"one.py": text})
    trace = run_example(project, read_page(project, project.modules[0]))
    assert trace.shapes == {16: "[T, 1]", 17: "[1]"}


def test_an_example_may_stand_in_the_last_note(tmp_path):
    text = '"""One."""\n\nx = 3\n\n\n# ## Try\n#\n# ```python example\n# plots = {"By name": {"a": x, "b": 1}}\n# ```\n'
    project = project_of(tmp_path, {"one.py": text})
    page = read_page(project, project.modules[0])
    assert page.captions() == ["By name"]
    assert run_example(project, page).plots == {"By name": {"a": 3.0, "b": 1.0}}
    build_site(project, tmp_path / "site", run=True)
    html = (tmp_path / "site/one.html").read_text()
    assert 'aria-label="By name: a 3, b 1"' in html and '<div class="row prose"' in html


def test_a_negative_number_is_told_by_its_form():
    drawn = heat_map([[-2.0, 0.0], [1.0, 2.0]], "x")
    assert 'd="M0.3 0.3h.4v.4h-.4z" fill="currentColor" fill-opacity="1.00"' in drawn
    assert 'd="M1 1h1v1h-1z" fill="currentColor" fill-opacity="1.00"' in drawn
    assert "M1 0h" not in drawn and "M1.3 0" not in drawn


def test_a_drawing_tells_what_it_is_in_the_language_of_the_page():
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><title>English</title><desc>More</desc><g><title>Part</title></g></svg>'
    drawn = inline_svg(svg, "日本語", "p")
    assert (
        "English" not in drawn and "More" not in drawn and "Part" in drawn and 'aria-label="日本語"' in drawn
    )


def test_plots_are_small():
    drawn = heat_map([[x * y for x in range(30)] for y in range(30)], "A <b>")
    assert drawn.count("<") < 25 and "A &lt;b&gt;: 30 × 30" in drawn
    assert "polyline" in line_plot([3.0, 2.0, 2.5], "Loss")
    assert "<svg" in heat_map([[1.0, 1.0]], "flat")
