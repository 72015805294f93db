# ruff: noqa: E501  (payloads and programs in strings are read whole)
"""A browser, and sites to look at with it.

Needs Playwright for Python and a Chromium (`CHROMIUM`, else the one in the path). axe-core and html-validate come
with `npm install --no-package-lock --prefix tests/browser`; a test that finds its tool missing is skipped.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from postil.pages.catalogue import po_file, read_catalog, write_catalogue
from postil.pages.cli import translate_update
from postil.pages.project import open_project
from postil.pages.site import build_site

HERE = Path(__file__).parent
OURS = HERE.parents[1] / "src" / "postil"
AXE = HERE / "node_modules/axe-core/axe.min.js"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright for Python")
    if not CHROMIUM:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Look:
    """A page that is open, and everything it did that nobody wanted."""

    page: object
    console: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def outside(self) -> list[str]:
        return [url for url in self.requests if not url.startswith("file:")]


@pytest.fixture
def look(browser):
    """Open a file as a reader would, from the disk: `look(file, width=390, theme="dark")`."""
    contexts = []

    def open_page(
        file: Path, *, width: int = 1440, theme: str = "light", anchor: str = "", **options
    ) -> Look:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, **options)
        contexts.append(context)
        page = context.new_page()
        found = Look(page)
        page.on("console", lambda message: found.console.append(message.text))
        page.on("pageerror", lambda error: found.console.append(str(error)))
        page.on("request", lambda request: found.requests.append(request.url))
        page.on("dialog", lambda dialog: (found.dialogs.append(dialog.message), dialog.dismiss()))
        page.goto(file.as_uri() + anchor)
        page.wait_for_load_state("load")
        return found

    yield open_page
    for context in contexts:
        context.close()


PAGE = '''r"""Attention: a weighted average of values.

Each position sends out a *query* and receives the values whose keys match it:

$$Y_t = \\sigma(Q_t) \\odot \\frac{\\sum_{s} \\exp(K_s + w_{t,s}) \\odot V_s}{\\sum_{s} \\exp(K_s + w_{t,s})} \\tag{1}$$

See [equation 1](#eq-1), and `weights` for the code.

## What it costs

$T^2 D$ time; see [the other page](other.py#Thing).

```python example T=6 D=4
x = np.ones((6, 4))
y = attend(x, x, x)
plots = {"Lower triangle": np.tril(np.ones((6, 6)))}
```

:paper: zhai2021
:terms:
    K: key, exp_key
    Q: query
    w_{t,s}: pos_bias
"""

from __future__ import annotations

import numpy as np


# The maximum is taken out first, or `exp` overflows at 88 in single precision. Nothing changes: it cancels.
def weights(query, key, pos_bias=None):
    r"""Weights $a_{t,s}$ of equation (1); rows sum to one.

    Source: [zhai2021], Eq. 2.

    Raises:
        ValueError: the sizes of `query` and `key` differ.
    """
    scores = np.einsum("td,sd->ts", query, key)
    # Each row by itself.
    exp_key = np.exp(scores - scores.max(axis=1, keepdims=True))
    return exp_key / exp_key.sum(axis=1, keepdims=True)


def attend(query, key, value):
    r"""Average `value` by `weights`."""
    return weights(query, key) @ value


class Long:
    r"""A class to scroll through."""

''' + "".join(
    f'    def method_{i}(self, constructor):\n        r"""Method {i}."""\n        return self.constructor({i})\n\n'
    for i in range(40)
)
JAPANESE = {
    "Attention": "アテンション",
    "a weighted average of values": "値の加重平均",
    "What it costs": "計算量",
    "Each row by itself.": "行ごとに計算します。",
    "Average `value` by `weights`.": "`value` を `weights` で平均します。",
}
CHINESE = {
    "Attention": "注意力",
    "a weighted average of values": "值的加权平均",
    "Each row by itself.": "逐行计算。",
}


def _translate(home: Path, language: str, translations: dict[str, str]) -> None:
    file = po_file(home / "locale", language, "attention")
    catalog = read_catalog(file, language)
    assert catalog is not None
    for english, translated in translations.items():
        catalog[english].string = translated
    write_catalogue(file, catalog)


@pytest.fixture(scope="session")
def sample(tmp_path_factory) -> Path:
    """A small site with everything a page can have, in three languages."""
    home = tmp_path_factory.mktemp("sample")
    (home / "pkg").mkdir()
    (home / "pkg/__init__.py").write_text('"""Sample: a site to test with."""\n')
    (home / "pkg/attention.py").write_text(PAGE)
    (home / "pkg/other.py").write_text(
        '"""Other: another page."""\n\n\nclass Thing:\n    """A thing."""\n\n    x = 1\n'
    )
    (home / "papers.toml").write_text(
        '[zhai2021]\ntitle = "AFT"\nauthors = "A Zhai, B C, D E"\nyear = 2021\nurl = "https://arxiv.org/abs/2105.14103"\n'
    )
    (home / "pages.toml").write_text(
        'title = "Sample"\nlanguages = ["zh_CN", "ja"]\nbase_url = "https://x.example/"\nnotebooks = "notebooks"\n'
    )
    translate_update(home / "pkg")
    _translate(home, "ja", JAPANESE)
    _translate(home, "zh_CN", CHINESE)
    build_site(open_project(home / "pkg"), home / "site", run=True)
    return home / "site"


@pytest.fixture(scope="session")
def our_site(tmp_path_factory) -> Path:
    """The library's own site, in the languages it has."""
    out = tmp_path_factory.mktemp("ours") / "site"
    build_site(open_project(OURS, languages=["zh_CN", "ja"]), out, run=True, keep_lock=False)
    return out
