# ruff: noqa: E501  (payloads and programs in strings are read whole)
"""The budget of a page, measured in the browser on the pages of the three papers and of masks."""

import json
import re
import subprocess

import pytest

from postil.pages.checking import check_site

from .conftest import AXE, HERE

PAGES = [
    "mixers/aft/local.html",
    "mixers/aft/full.html",
    "mixers/aft/index.html",
    "mixers/multi_head_attention.html",
    "mixers/feedback/index.html",
    "mixers/feedback/attention.html",
    "mixers/feedback/memory.html",
    "masks.html",
]
LANGUAGES = ["", "zh-CN/", "ja/"]


def existing(site) -> list[str]:
    return [name for name in PAGES if (site / name).is_file()]


def test_the_budget(our_site, look):
    assert existing(our_site) == PAGES
    for name in PAGES:
        for language in LANGUAGES:
            found = look(our_site / f"{language}{name}")
            found.page.wait_for_timeout(300)
            sizes = {
                url: (our_site / url.split("/site/")[1].partition("#")[0]).stat().st_size
                for url in set(found.requests)
            }
            html = next(size for url, size in sizes.items() if url.endswith(".html"))
            nodes = found.page.evaluate("document.querySelectorAll('*').length")
            print(
                f"{language}{name}: HTML {html / 1000:.1f} KB, all {sum(sizes.values()) / 1000:.1f} KB, {nodes} nodes"
            )
            assert html <= 60_000, (language, name)
            assert sum(sizes.values()) <= 140_000, sizes
            assert nodes <= 2_000
            assert found.outside == [] and found.console == []


# Two corners of the grid run always, the whole grid with the slow tests: one page takes the tool seconds.
@pytest.mark.parametrize(
    ("width", "theme"),
    [(1440, "light"), (390, "dark")]
    + [
        pytest.param(w, t, marks=pytest.mark.slow)
        for w in (1440, 820, 390)
        for t in ("light", "dark")
        if (w, t) not in ((1440, "light"), (390, "dark"))
    ],
)
def test_no_accessibility_violation(our_site, sample, look, theme, width):
    if not AXE.is_file():
        pytest.skip("needs axe-core")
    # The policy of the page forbids scripts from elsewhere, so the tool is put in by the browser itself.
    pages = [sample / "ja/attention.html", sample / "zh-CN/index.html", sample / "search.html"]
    pages += [our_site / f"{language}{name}" for language in LANGUAGES for name in existing(our_site)[:1]]
    pages += [our_site / "mixers/multi_head_attention.html", our_site / "ja/mixers/feedback/index.html"]
    for file in pages:
        page = look(file, width=width, theme=theme, bypass_csp=True).page
        page.add_script_tag(path=str(AXE))
        page.wait_for_timeout(200)
        violations = page.evaluate(
            "async () => (await axe.run()).violations.map(v => [v.id, v.nodes.slice(0, 3).map(n => n.html + ' ' + n.failureSummary)])"
        )
        assert violations == [], (file, violations)


def test_html_is_valid(our_site, sample):
    validator = HERE / "node_modules/.bin/html-validate"
    if not validator.exists():
        pytest.skip("needs html-validate")
    files = [
        str(sample / name)
        for name in ("attention.html", "ja/attention.html", "index.html", "search.html", "404.html")
    ]
    files += [str(our_site / name) for name in existing(our_site)]
    done = subprocess.run(
        ["node", str(validator), "--config", str(HERE / "html-validate.json"), "--formatter", "json", *files],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    found = [
        (r["filePath"], m["line"], m["ruleId"], m["message"])
        for r in json.loads(done.stdout)
        for m in r["messages"]
    ]
    assert found == []


def test_no_broken_link_or_anchor(our_site, sample):
    assert list(check_site(our_site)) == []
    assert list(check_site(sample)) == []


def test_the_security_policy_is_on_every_page(our_site):
    for file in our_site.rglob("*.html"):
        assert re.search(
            r'http-equiv="Content-Security-Policy" content="default-src \'self\'', file.read_text()
        ), file
