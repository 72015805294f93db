"""Leaflets in a browser, from the disk: they work there, and ask nobody for anything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import postil.leaflet
from postil.comparing.chart import _DASHES, STYLE, chart
from postil.leaflet import DARK, HUES, LIGHT, leaflet
from postil.registry import ModelSettings, build_language_model
from postil.showing import Picture, as_page, pictures

CHROMIUM = Path("/usr/bin/chromium")
CSS = Path(postil.leaflet.__file__).parent / "pages/assets/page.css"


def test_colours_are_those_of_the_site():
    found = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\);", CSS.read_text())
    for colours, side in ((LIGHT, 1), (DARK, 2)):
        of_site = {each[0]: each[side] for each in found}
        assert {name: of_site[name] for name in colours} == colours


def brightness(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("side", [0, 1])
def test_lines_can_be_seen_on_their_page(side):
    page = brightness((LIGHT, DARK)[side]["page"])
    for pair in HUES:
        low, high = sorted((page, brightness(pair[side])))
        assert (high + 0.05) / (low + 0.05) >= 4.5
    assert len(set(_DASHES)) == len(HUES)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        pytest.skip("there is no /usr/bin/chromium")
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser, path: Path, text: str):
    """Open a file; collect what it asks for and complains about."""
    path.write_text(text, encoding="utf-8")
    page, asked, said = browser.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(path.as_uri())
    return page, asked, said


def test_the_pictures_work_from_the_disk(browser, tmp_path):
    torch.manual_seed(0)
    settings = ModelSettings(d_model=8, n_layers=2, heads=2, d_ff=16, seq_len=12, dropout=0.0)
    model = build_language_model("multi-head-attention", settings, 11)
    found = pictures(model, torch.tensor([1, 2, 3, 4]))
    page, asked, said = opened(
        browser, tmp_path / "index.html", as_page(found, ["a", "b", "\n", "<d>"], "What")
    )
    assert page.locator("#part option").all_text_contents() == ["head 1", "head 2"]
    page.select_option("#layer", "2")
    page.select_option("#part", "head 2")
    page.focus("#map")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    weights = found[-1].values
    # Levels of a byte: the value read is right to half a level of the largest in its row.
    text = page.inner_text("#said")
    assert text.startswith("<d> (4), b (2): ")
    assert float(text.rpartition(" ")[2]) == pytest.approx(
        float(weights[3, 1]), abs=float(weights[3].max()) / 510 + 5e-4
    )
    assert page.locator("#text .reader").text_content() == "<d>"
    page.locator("#text span").nth(1).click()
    assert page.inner_text("#said") == "b (2)"
    assert page.locator("#top tr").count() == 2
    assert asked == [(tmp_path / "index.html").as_uri()] and said == []


def test_a_leaflet_may_ask_nobody(browser, tmp_path):
    drawn = chart({"a": [[(0, 1.0), (1e6, 0.5)]], "b": [[(0, 2.0)]]}, "tokens", "bits")
    evil = '<img src="https://example.invalid/x.png"><p id="p">here</p>'
    page, _, said = opened(browser, tmp_path / "a.html", leaflet("Chart", drawn + evil, style=STYLE))
    assert page.inner_text("#p") == "here"
    assert any("Content Security Policy" in line for line in said)
    page.set_viewport_size({"width": 360, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_pictures_of_other_kinds(browser, tmp_path):
    """Biases have a sign, the memory's weights no text; both are told in words and bars."""
    biases = Picture("position biases", 1, "all channels", torch.tensor([[0.0, 0.0], [-2.0, 1.0]]))
    layers = Picture("memory", 0, "layers", torch.tensor([[0.25, 0.75]]), False, ("input", "layer 1"))
    page, _, said = opened(
        browser, tmp_path / "index.html", as_page([biases, layers], ["a", "b"], "Two kinds")
    )
    assert page.inner_text("#said") == "b (2)" and page.inner_text("#unit") == "bias"
    assert page.locator("#top tr").all_inner_texts() == ["a (1)\t-2.000", "b (2)\t1.000"]
    assert "From -2.000 (red) over 0 to 1.000 (blue)" in page.inner_text("#range")
    page.select_option("#kind", "memory")
    assert page.locator("#top tr").all_inner_texts() == ["layer 1\t0.750", "input\t0.250"]
    assert not page.locator("#map").is_visible() and page.inner_text("#what") == "made of"
    page.select_option("#kind", "position biases")
    assert page.locator("#map").is_visible() and said == []
