"""Notebooks: made from the pages, the committed ones current, and executed from scratch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from postil.pages.cli import main
from postil.pages.notebook import colab_link, has_trial, notebook_json, write_notebooks
from postil.pages.project import open_project
from postil.pages.reading import read_page

from .making import project_of

ROOT = Path(__file__).parents[2]
COMMITTED = sorted((ROOT / "notebooks").rglob("*.ipynb"))

PAGE = r'''
r"""Doubling: twice as much.

Why, see [somebody2020], and [nobody] else.

## Try it

Twice two.

```python notebook parameters
x = 2
```

Then:

```python notebook
assert double(x) == 2 * x
```

:requires: pkg[plot]
"""

# It adds, see [somebody2020].
def double(x):
    return x + x


if __name__ == "__main__":
    raise SystemExit("a script")
'''
PAPERS = '[somebody2020]\ntitle = "T"\nurl = "https://p.example/1"\nauthors = "A. Somebody"\nyear = "2020"\n'


def made(folder: Path, **settings) -> list[dict]:
    project_of(folder, {"one.py": PAGE, "two.py": '"""Two."""\n'})
    (folder / "papers.toml").write_text(PAPERS)
    project = open_project(folder / "pkg", **settings)
    return json.loads(notebook_json(project, read_page(project, project.modules[0])))["cells"]


def sources(cells: list[dict]) -> list[str]:
    return ["".join(cell["source"]) for cell in cells]


def test_what_is_to_be_tried_comes_last(tmp_path):
    cells = made(tmp_path)
    heading, _, code, before, parameters, between, trial = sources(cells)
    assert heading.startswith("# Doubling\n\ntwice as much\n\nWhy") and "Try it" not in heading
    assert "def double" in code and "SystemExit" not in "".join(sources(cells))
    assert before == "## Try it\n\nTwice two." and between == "Then:"
    assert [cell["metadata"].get("tags") for cell in cells if cell["cell_type"] == "code"] == [
        None,
        ["parameters"],
        None,
    ]
    names: dict[str, object] = {"__name__": "__main__"}
    for source in (code, parameters, trial):
        exec(source, names)


def test_papers_are_links(tmp_path):
    heading, note, *_ = sources(made(tmp_path))
    assert "[Somebody 2020](https://p.example/1), and [nobody] else" in heading
    assert note == "It adds, see [Somebody 2020](https://p.example/1)."


def test_a_notebook_brings_its_badge_and_what_to_install(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    cells = made(tmp_path, repository="https://github.com/somebody/pkg/")
    address = "https://colab.research.google.com/github/somebody/pkg/blob/main/notebooks/one.ipynb"
    assert f"[![Open in Colab](attachment:colab.svg)]({address})" in "".join(cells[0]["source"])
    assert set(cells[0]["attachments"]["colab.svg"]) == {"image/svg+xml"}
    installation = "".join(cells[1]["source"])
    assert 'find_spec("pkg")' in installation
    assert '%pip install --quiet "pkg[plot] @ git+https://github.com/somebody/pkg"' in installation
    project = open_project(tmp_path / "pkg", repository="https://github.com/somebody/pkg/")
    for module in project.modules:
        text = notebook_json(project, read_page(project, module))
        nbformat.validate(nbformat.reads(text, as_version=4))
    # Elsewhere than on GitHub there is no Colab, and without a repository nothing safe to install.
    cells = made(tmp_path, repository="https://git.example/pkg")
    assert "colab" not in "".join(sources(cells)) and "git+https://git.example/pkg" in sources(cells)[1]
    assert "%pip" not in "".join(sources(made(tmp_path)))


def test_one_command_writes_those_that_have_something_to_try(tmp_path, capsys):
    made(tmp_path)
    assert main(["notebooks", str(tmp_path / "pkg")]) == 0
    path = tmp_path / "notebooks/one.ipynb"
    assert capsys.readouterr().out == f"{path}\n" and list(path.parent.iterdir()) == [path]
    before = path.read_bytes()
    assert write_notebooks(open_project(tmp_path / "pkg")) == [path] and path.read_bytes() == before
    (tmp_path / "pkg/one.py").unlink()
    assert main(["notebooks", str(tmp_path / "pkg")]) == 1
    assert "```python notebook" in capsys.readouterr().err


# ## Ours
def test_the_committed_notebooks_are_those_of_the_pages():
    project = open_project(ROOT / "src/postil")
    pages = [read_page(project, module) for module in project.modules]
    found = {page.module.path: page for page in pages if has_trial(page)}
    experiments = {p.module.path for p in pages if p.module.name.startswith("experiments.")}
    assert experiments <= found.keys()
    assert [ROOT / "notebooks" / f"{path[:-3]}.ipynb" for path in sorted(found)] == COMMITTED
    for path, page in found.items():
        committed = (ROOT / "notebooks" / f"{path[:-3]}.ipynb").read_bytes()
        assert committed == notebook_json(project, page).encode(), "stale: postil pages notebooks src/postil"
        address = colab_link(project, page.module)
        assert f"]({address})" in committed.decode() or not address


WORDS = ["It is the east", "Juliet is the sun", "JULIET:", "and yet no moon", "O Romeo", "who is it"]
QUICK = 'text, prompt, seconds, updates, width = "words.txt", "It is ", 0.5, 3, 16'


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """One for all, so that the kernel is built once."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_notebook_runs_from_scratch(path, cache, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if path.stem == "aft_images":
        pytest.importorskip("sklearn")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("POSTIL_CACHE", str(cache))
    (tmp_path / "words.txt").write_text("\n".join(WORDS[(i * i + 3 * i) % 6] for i in range(1000)))
    notebook = nbformat.read(path, as_version=4)
    # As tools that run notebooks do: other values in a cell after that of the parameters.
    (at,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ())]
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(QUICK))
    nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", ()) for output in shown)
    said = "".join(output.get("text", "") for output in shown)
    assert {"aft_images": "bits per dimension", "algorithmic": "; print x"}.get(path.stem, "It is") in said
