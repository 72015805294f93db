# ruff: noqa: E501  (payloads and programs in strings are read whole)
"""What a hostile source can put on a page: text, and nothing else."""

import json

import pytest

from postil.pages.cli import translate_update
from postil.pages.project import open_project
from postil.pages.site import build_site

PAYLOADS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "</pre><script>alert(1)</script>",
    "</title><script>alert(1)</script>",
    '"><script>alert(1)</script>',
    "' onmouseover='alert(1)",
    "<iframe src=javascript:alert(1)></iframe>",
    "<a href='javascript:alert(1)' autofocus onfocus=alert(1)>x</a>",
    "<style>@import 'https://evil.example/a.css'</style>",
    "<link rel=stylesheet href=https://evil.example/a.css>",
    "<meta http-equiv=refresh content='0;url=https://evil.example'>",
    "<base href=https://evil.example/>",
    "<form action=https://evil.example><input autofocus onfocus=alert(1)></form>",
    "<math><mtext></mtext><script>alert(1)</script></math>",
    "&#60;script&#62;alert(1)&#60;/script&#62;",
    "<!--><script>alert(1)</script>-->",
    "{{ 7 * 7 }}{% include 'x' %}",
    "](javascript:alert(1))",
    "<img src=https://evil.example/a.png>",
]
MARKDOWN = [
    "[click](javascript:alert(1))",
    "[click](JaVaScRiPt:alert(1))",
    "[click](data:text/html,<script>alert(1)</script>)",
    "[click](<java\tscript:alert(1)>)",
    "[click]( javascript:alert(1))",
    "<javascript:alert(1)>",
    "![pic](https://evil.example/a.png)",
    "![pic](javascript:alert(1))",
    "[ref]\n\n[ref]: javascript:alert(1) 'x\" onclick=alert(1)'",
    '[t](https://x.example "a\\" onmouseover=\\"alert(1)")',
    "$\\text{<script>alert(1)</script>}$",
    "$<img src=x onerror=alert(1)>$",
    "$$\\text{</math><script>alert(1)</script>} \\tag{<b>}$$",
    "```<script>alert(1)</script>\n<script>alert(1)</script>\n```",
    "# <script>alert(1)</script>",
    "| <script>alert(1)</script> |\n|---|\n| <img src=x onerror=alert(1)> |",
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Payloads in every place a source can put text: comments, docstrings, names, titles, formulas, settings, files."""
    home = tmp_path_factory.mktemp("hostile")
    package = home / "pkg<img src=x onerror=alert(1)>"
    package.mkdir()
    (package / "__init__.py").write_text('"""Home."""\n')
    for i, payload in enumerate(PAYLOADS):
        comment = "".join(f"# {line}\n" for line in payload.split("\n"))
        escaped = payload.replace("\\", "\\\\")
        (package / f"payload{i}.py").write_text(
            f'r"""{payload}: {payload}\n\n{payload}\n\n- {payload}\n\n:terms:\n    \\text{{{payload.replace(": ", "")}}}: x, {payload}\n"""\n\n{comment}x = {escaped!r}  # {payload}\n\n\n'
            f'def 𝒻_constructor(x):\n    r"""{payload}\n\n    Raises:\n        {payload}: {payload}\n    """\n    return x\n'.replace(
                "\x00", ""
            )
        )
    for i, markdown in enumerate(MARKDOWN):
        text = markdown.replace("\\\\", "\\")
        (package / f"markdown{i}.py").write_text(
            'r"""Page.\n\n'
            + text
            + '\n"""\n\n\n'
            + "".join(f"# {line}\n" for line in text.split("\n"))
            + "x = 1\n"
        )
    (package / "<img src=x onerror=alert(1)>.py").write_text('"""A file name."""\n')
    (package / "constructor.py").write_text(
        "class __proto__:\n    def toString(self):\n        return constructor\n\n    def constructor(self):\n        # hasOwnProperty\n        return self.constructor\n"
    )
    (home / "pages.toml").write_text(
        'title = "<script>alert(1)</script>"\nlanguages = ["ja"]\ndescription = "<script>alert(1)</script>"\n'
    )
    translate_update(package)
    build_site(open_project(package), home / "site", lenient=True)
    return home / "site"


def test_no_dialog_no_request_no_marker(hostile, look):
    pages = sorted(hostile.rglob("*.html"))
    assert len(pages) > 2 * (len(PAYLOADS) + len(MARKDOWN))
    found = look(pages[0])
    for file in pages:
        found.page.goto(file.as_uri())
        found.page.evaluate("document.querySelectorAll('main a, main [tabindex]').forEach(e => e.focus())")
        active = found.page.evaluate(
            """() => [...document.querySelectorAll('*')].flatMap(e => [...e.attributes].filter(a => /^on/i.test(a.name)
               || (/^(href|src|action|formaction)$/i.test(a.name) && /^\\s*(javascript|data|vbscript):/i.test(a.value))).map(a => a.name + '=' + a.value))
               .concat([...document.querySelectorAll('script')].filter(s => !s.src.includes('/_assets/') || s.textContent).map(s => s.outerHTML))
               .concat([...document.querySelectorAll('iframe, object, embed, base, style, meta[http-equiv=refresh], main form, main input')].map(e => e.outerHTML))"""
        )
        assert active == [], file
    assert found.dialogs == []
    assert found.outside == []
    assert [line for line in found.console if "Content Security Policy" in line or "evil" in line] == []


def test_searching_a_hostile_site_shows_text(hostile, look):
    found = look(hostile / "payload0.html")
    found.page.keyboard.press("/")
    for query in ("alert", "constructor", "__proto__"):
        found.page.locator("#page-search").fill(query)
        found.page.wait_for_selector(".results a")
        assert found.page.locator(".results script, .results img").count() == 0
    assert found.dialogs == [] and found.outside == []


def test_a_name_like_constructor_breaks_nothing(hostile, look):
    found = look(hostile / "constructor.html")
    for name in ("constructor", "__proto__", "toString"):
        assert found.page.locator(".contents a", has_text=name).count() <= 1
    found.page.locator(".code pre").last.click()
    found.page.keyboard.press("j")
    assert found.console == []


def test_the_index_is_data(hostile):
    script = (hostile / "_assets/index.en.js").read_text()
    titles, documents = json.loads(script.removeprefix("var postilIndex = ").rstrip(";\n"))
    assert len(titles) > 30 and len(documents) > 60


def test_inline_scripts_would_not_run(sample, look):
    found = look(sample / "attention.html")
    found.page.evaluate(
        """() => { const s = document.createElement('div'); s.innerHTML = '<img src="x" onerror="window.ran = 1">'; document.body.append(s); }"""
    )
    found.page.wait_for_timeout(200)
    assert found.page.evaluate("window.ran") is None
    assert any("Content Security Policy" in line for line in found.console)
