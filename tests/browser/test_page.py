# ruff: noqa: E501  (payloads and programs in strings are read whole)
"""What a page does for its reader, in Chromium, opened from the disk."""

import re

import pytest


def text_of(page, selector: str) -> str:
    return page.locator(selector).first.inner_text()


def lit(page) -> set[str]:
    """What is marked at this moment: text of elements whose outline shows."""
    return set(
        page.evaluate(
            """() => [...document.querySelectorAll('[class^="t"]')].filter(e => /^t\\d/.test(e.className.baseVal ?? e.getAttribute('class'))
               && getComputedStyle(e).outlineStyle === 'solid' && getComputedStyle(e).textDecorationLine.includes('underline'))
               .map(e => e.textContent.replace(/\\s+/g, ' ').trim())"""
        )
    )


def test_notes_stand_left_of_code_and_below_it_on_a_phone(sample, look):
    wide = look(sample / "attention.html").page
    note, code = wide.locator("#weights .note").bounding_box(), wide.locator("#weights .code").bounding_box()
    assert note["x"] + note["width"] <= code["x"] + 1
    assert 5 / 7 - 0.02 < note["width"] / code["width"] < 5 / 7 + 0.02
    narrow = look(sample / "attention.html", width=390).page
    note, code = (
        narrow.locator("#weights .note").bounding_box(),
        narrow.locator("#weights .code").bounding_box(),
    )
    assert note["y"] + note["height"] <= code["y"] + 1 and code["width"] == 390


@pytest.mark.parametrize("width", [1440, 820, 390, 320])
def test_nothing_scrolls_sideways(sample, look, width):
    for name in ("attention.html", "index.html", "search.html", "zh-CN/attention.html", "ja/attention.html"):
        page = look(sample / name, width=width).page
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_line_numbers_are_those_of_the_file_and_level_with_their_lines(sample, look):
    page = look(sample / "attention.html").page
    source = (sample.parent / "pkg/attention.py").read_text().split("\n")
    shown = page.evaluate(
        """() => [...document.querySelectorAll('.row pre')].map(p => [p.dataset.n.split('\\n').map(Number), p.textContent.split('\\n')])"""
    )
    for numbers, lines in shown:
        assert len(numbers) == len(lines)
        assert [source[n - 1] for n in numbers] == lines
    heights = page.evaluate(
        """() => [...document.querySelectorAll('.code > pre')].map(p => [p.clientHeight, p.dataset.n.split('\\n').length * 20])"""
    )
    assert all(abs(real - expected) <= 16 for real, expected in heights)


def test_a_selection_holds_no_line_number(sample, look):
    page = look(sample / "attention.html").page
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#attend .code'))")
    selected = page.evaluate("getSelection().toString()")
    assert "def attend(query, key, value):" in selected
    assert not re.search(r"^\s*\d+\s*$", selected, re.M)
    compile(selected, "selected", "exec")


def test_the_copy_button_gives_the_code_of_the_row(sample, look):
    page = look(sample / "attention.html", permissions=["clipboard-read", "clipboard-write"]).page
    page.locator("#attend .code").hover()
    page.locator("button.copy").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith('def attend(query, key, value):\n    r"""Average `value` by `weights`."""\n')
    compile(copied, "copied", "exec")


def test_the_copy_button_gives_the_tex_of_a_formula(sample, look):
    page = look(sample / "attention.html", permissions=["clipboard-read", "clipboard-write"]).page
    page.locator("#eq-1").hover()
    page.locator("#eq-1 button.copy").click()
    assert page.evaluate("navigator.clipboard.readText()").startswith(r"Y_t = \sigma(Q_t) \odot \frac")


def test_a_copied_selection_holds_tex(sample, look):
    page = look(sample / "attention.html", permissions=["clipboard-read", "clipboard-write"]).page
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#weights .note'))")
    page.keyboard.press("Control+c")
    assert r"$a_{t,s}$" in page.evaluate("navigator.clipboard.readText()")


@pytest.mark.parametrize("scripts", [True, False])
def test_symbols_and_names_light_each_other(sample, look, scripts):
    page = look(sample / "attention.html", java_script_enabled=scripts).page
    page.locator("#eq-1 .t1").first.hover()
    assert {"K", "key", "exp_key"} <= lit(page)
    page.locator("#weights .code .t1").first.hover()
    assert "K" in lit(page) and "Q" not in lit(page)
    page.locator(".terms .t3").hover()
    assert {"pos_bias"} <= lit(page) and any("w" in text for text in lit(page))
    page.mouse.move(5, 5)
    assert lit(page) == set()


def test_symbols_are_reached_by_the_keyboard(sample, look):
    page = look(sample / "attention.html").page
    page.locator("#eq-1 [tabindex='0']").first.focus()
    assert lit(page)
    first = page.evaluate("document.activeElement.getAttribute('class')")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('class')") != first
    page.locator("#weights .code [tabindex='0']").first.focus()
    assert "Q" in lit(page)


def test_a_click_lights_equal_names_and_grows(sample, look):
    page = look(sample / "attention.html").page
    target = page.locator("#Long\\.method_3 .code pre").first
    target.scroll_into_view_if_needed()
    size = "[...CSS.highlights.get('same')].map(r => r.toString())"
    box = page.evaluate(
        """() => { const pre = [...document.querySelectorAll('#Long\\\\.method_3 .code > pre')].at(-1);
        const walk = document.createTreeWalker(pre, NodeFilter.SHOW_TEXT); let node;
        while ((node = walk.nextNode())) { const at = node.data.indexOf('constructor'); if (at >= 0) {
        const r = document.createRange(); r.setStart(node, at + 2); r.setEnd(node, at + 3); const b = r.getBoundingClientRect();
        return [b.x + 2, b.y + b.height / 2]; } } }"""
    )
    page.mouse.click(*box)
    assert page.evaluate(size) == ["constructor"] * 80
    page.wait_for_timeout(600)
    page.mouse.click(*box)
    assert page.evaluate(size) == ["self.constructor"] * 40
    page.wait_for_timeout(600)
    page.mouse.click(*box)
    assert page.evaluate(size) == ["self.constructor(3)"]


def test_a_click_lights_equal_parts_of_formulas(sample, look):
    page = look(sample / "attention.html").page
    page.locator("#eq-1 mi", has_text="K").first.click()
    assert page.locator("math .same").count() >= 2


def test_languages_keep_the_place(sample, look):
    page = look(sample / "attention.html").page
    page.evaluate("document.getElementById('Long.method_5').scrollIntoView({behavior: 'instant'})")
    # By its coordinates, as a reader would: a locator's click scrolls first.
    box = page.locator(".languages a", has_text="日本語").bounding_box()
    with page.expect_navigation():
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert page.url.endswith("ja/attention.html#Long.method_5")
    assert page.evaluate("document.documentElement.lang") == "ja"
    top = page.locator("#Long\\.method_5").bounding_box()["y"]
    assert 0 <= top < 120


def test_untranslated_blocks_are_english_and_say_so(sample, look):
    page = look(sample / "ja/attention.html").page
    assert text_of(page, "h1") == "アテンション"
    assert page.locator("#attend .note p").first.get_attribute("lang") is None
    missing = page.locator("#weights .untranslated").first
    assert missing.get_attribute("lang") == "en" and "maximum" in missing.inner_text()
    assert page.locator("#weights .code").get_attribute("translate") == "no"
    assert "ブロック" in text_of(page, "footer")


@pytest.mark.parametrize(
    ("name", "query", "expected"),
    [("attention.html", "overflows", "weights"), ("zh-CN/attention.html", "逐行", "weights"), ("ja/attention.html", "加重平均", "アテンション"),
     ("other.html", "method_7", "Long.method_7"), ("ja/other.html", "行ごと", "weights"), ("index.html", "constructor", "")],
)  # fmt: skip
def test_search_finds_from_the_disk(sample, look, name, query, expected):
    found = look(sample / name)
    page = found.page
    page.keyboard.press("/")
    page.keyboard.type(query)
    if not expected:
        page.wait_for_selector(".results p")
    else:
        page.wait_for_selector(".results a")
        assert expected in text_of(page, ".results")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.wait_for_load_state("load")
    assert found.outside == [] and found.console == []


def test_the_search_page_answers_an_address(sample, look):
    page = look(sample / "search.html", anchor="?q=overflows").page
    page.wait_for_selector("#page-results a")
    assert "weights" in text_of(page, "#page-results")


def test_keys(sample, look):
    page = look(sample / "attention.html").page
    ids = []
    for _ in range(4):
        page.keyboard.press("j")
        ids.append(page.evaluate("document.activeElement.id"))
    page.keyboard.press("k")
    assert len(set(ids)) == 4 and page.evaluate("document.activeElement.id") == ids[2]
    assert (
        page.evaluate("getComputedStyle(document.activeElement.querySelector('.note')).boxShadow") != "none"
    )
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_tab_reaches_everything_in_order(sample, look):
    page = look(sample / "attention.html").page
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate(
                "(document.activeElement.textContent || document.activeElement.placeholder || '').trim()"
            )
        )
    assert seen[0] == "Skip to the notes" and "Sample" in seen[1] and "日本語" in seen


def test_it_reads_without_scripts(sample, browser):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((sample / "attention.html").as_uri())
    assert page.locator("math").count() > 3
    assert page.locator(".row").count() > 15
    page.locator(".contents a", has_text="attend").click()
    assert page.url.endswith("#attend")
    page.locator("#attend summary").click()
    assert page.locator("#attend .doc pre").is_visible()
    page.locator(".languages a", has_text="中文").click()
    assert page.url.endswith("zh-CN/attention.html")
    page.locator(".pager [rel=prev]").click()
    assert page.locator("h1").inner_text()
    context.close()


def test_print_shows_notes_and_code_only(sample, look):
    page = look(sample / "attention.html").page
    page.emulate_media(media="print")
    assert not page.locator(".bar").is_visible() and not page.locator(".contents").is_visible()
    assert page.locator("#weights .code").is_visible()


def test_the_shorter_side_of_a_row_stays_in_sight(sample, look):
    page = look(sample / "attention.html").page
    tall = page.locator("#weights")
    heights = [tall.locator(part).bounding_box()["height"] for part in (".note", ".code")]
    row = tall.bounding_box()
    assert abs(row["height"] - max(heights)) <= 2
    page.evaluate("y => scrollTo({top: y, behavior: 'instant'})", row["y"] + 30)
    shorter = tall.locator((".note", ".code")[heights.index(min(heights))]).bounding_box()
    assert shorter["y"] >= 48


def test_shapes_are_shown_and_not_copied(sample, look):
    page = look(sample / "attention.html").page
    shape = page.locator("b[data-shape]").first
    assert shape.get_attribute("data-shape") == "[T, T]"
    assert page.evaluate("e => e.getBoundingClientRect().width", shape.element_handle()) > 30
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#weights .code'))")
    assert "[T, T]" not in page.evaluate("getSelection().toString()")


def test_permalinks_lead_to_their_row(sample, look):
    page = look(sample / "attention.html", anchor="#Long.method_9").page
    page.wait_for_timeout(100)
    assert 40 <= page.locator("#Long\\.method_9").bounding_box()["y"] < 120
