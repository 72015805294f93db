# ruff: noqa: E501  (rules are read whole)
from pathlib import Path

import pytest

from postil.pages.checking import check_contrast, check_site, contrast
from postil.pages.furniture import ASSETS


def site_of(folder: Path, **pages: str) -> list[str]:
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    return [str(fault) for fault in check_site(folder)]


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="gone.html">x</a>', "leads nowhere"),
        ('<a href="#gone">x</a>', "no such anchor"),
        ('<a href="other.html#gone">x</a>', "no such anchor"),
        ('<a href="../../etc/passwd">x</a>', "leads out of the site"),
        ('<i id="x"></i><i id="x"></i>', "given twice"),
        ('<img src="https://evil.example/a.png">', "asks another machine"),
        ('<script src="//evil.example/a.js"></script>', "asks another machine"),
        ('<link rel="stylesheet" href="gone.css">', "does not exist"),
    ],
)
def test_seeded_faults_of_a_site(tmp_path, body, fault):
    (found,) = site_of(tmp_path, page=body, other="<p id='here'></p>")
    assert found.startswith("page.html:1: ") and fault in found


def test_good_links_pass(tmp_path):
    assert (
        site_of(
            tmp_path,
            page='<a href="other.html#h%C3%A9re">x</a><a href="https://x.example/">y</a>',
            other='<p id="hére"></p>',
        )
        == []
    )


def test_our_colours_can_be_read():
    assert list(check_contrast([ASSETS / "page.css"])) == []


def test_contrast_is_that_of_the_standard():
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize(
    ("rules", "faults"),
    [
        (":root { --muted: light-dark(#57606a, #333333); }", ["dark: --muted on --page", "dark: --muted on --panel"]),
        (":root { --muted: light-dark(#999999, #9198a1); }", ["light: --muted on --page", "light: --muted on --panel"]),
        (':root[data-theme="dark"] { --muted: #333333; }', ["dark: --muted on --page", "dark: --muted on --panel"]),
        (':root:not([data-theme="light"]) { --muted: #333333; }', ["dark: --muted on --page", "dark: --muted on --panel"]),
        (':root[data-theme="light"] { --muted: #999999; }', ["light: --muted on --page", "light: --muted on --panel"]),
        (":root { --muted: #57606a; }", ["dark: --muted on --page", "dark: --muted on --panel"]),
        (":root { --muted: light-dark(#57606a, #9198a1); }", []),
    ],
)  # fmt: skip
def test_both_themes_of_a_sheet_are_measured(tmp_path, rules, faults):
    sheet = tmp_path / "site.css"
    sheet.write_text(rules)
    found = [str(fault) for fault in check_contrast([ASSETS / "page.css", sheet])]
    assert [f.removeprefix("site.css:1: ").partition(" has")[0] for f in found] == faults
