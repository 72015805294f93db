# ruff: noqa: E501  (payloads and programs in strings are read whole)
from pathlib import Path

import pytest
from babel.messages.pofile import read_po

from postil.pages.catalogue import po_file, read_catalog, read_catalogue, write_catalogue
from postil.pages.checking import check_project
from postil.pages.cli import translate_extract, translate_progress, translate_update
from postil.pages.project import open_project
from postil.pages.proofreading import Glossary, faults_of, read_glossary
from postil.pages.site import build_site

from .making import project_of

GLOSSARY = Path(__file__).parents[2] / "locale" / "glossary.csv"
PAGE = 'r"""Masks: who may read whom.\n\nA *mask* says which `key` is read, $T$ by $S$.\n"""\n\n\n# Nothing {here} is a format, 100% sure.\nx = 1\n'


def says(file: Path, language: str, translations: dict[str, str]) -> None:
    """Fill in translations."""
    catalog = read_catalog(file, language)
    assert catalog is not None
    for english, translated in translations.items():
        catalog[english].string = translated
    write_catalogue(file, catalog)


@pytest.fixture
def project(tmp_path):
    project_of(tmp_path, {"masks.py": PAGE})
    (tmp_path / "pages.toml").write_text('languages = ["ja", "zh_CN"]\n')
    translate_update(tmp_path / "pkg")
    return tmp_path


def ja(project: Path) -> Path:
    return po_file(project / "locale", "ja", "masks")


def test_one_message_a_block_with_anchors_for_places(project):
    catalog = read_po(ja(project).open("rb"))
    found = {m.id: [place for place, _ in m.locations] for m in catalog if m.id}
    assert found == {
        "Masks": ["#page-top"],
        "who may read whom": ["#page-top"],
        "A *mask* says which `key` is read, $T$ by $S$.": ["#page-top"],
        "Nothing {here} is a format, 100% sure.": ["#~nothing-here-is"],
    }
    assert b"brace-format" not in ja(project).read_bytes()


def test_an_update_changes_nothing_twice_and_nothing_for_code(project):
    before = ja(project).read_bytes()
    assert translate_update(project / "pkg") == 0
    (project / "pkg/masks.py").write_text(PAGE.replace("x = 1", "import os\n\nx = 2"))
    assert translate_update(project / "pkg") == 0
    assert ja(project).read_bytes() == before


def test_a_changed_block_keeps_its_translation_for_the_translator_only(project):
    says(
        ja(project),
        "ja",
        {"Nothing {here} is a format, 100% sure.": "ここに書式はありません。", "Masks": "マスク"},
    )
    assert read_catalogue(ja(project), "ja").translate("Masks") == "マスク"
    (project / "pkg/masks.py").write_text(PAGE.replace("100% sure", "quite sure"))
    translate_update(project / "pkg")
    catalog = read_catalog(ja(project), "ja")
    entry = catalog["Nothing {here} is a format, quite sure."]
    assert entry.fuzzy and entry.string == "ここに書式はありません。"
    assert read_catalogue(ja(project), "ja").translate("Nothing {here} is a format, quite sure.") is None
    build_site(open_project(project / "pkg"), project / "site")
    page = (project / "site/ja/masks.html").read_text()
    assert "<h1>マスク</h1>" in page
    assert '<p lang="en" class="untranslated">Nothing {here} is a format, quite sure.</p>' in page
    assert any("outdated" in str(fault) for fault in check_project(open_project(project / "pkg")))


def test_progress(project):
    says(ja(project), "ja", {"Masks": "マスク"})
    assert translate_progress(project / "pkg") == {"ja": (1, 4), "zh_CN": (0, 4)}


def test_templates(project, tmp_path):
    assert translate_extract(project / "pkg", tmp_path / "templates") == 4
    assert (tmp_path / "templates/masks.pot").is_file()


def test_a_po_file_that_is_none_is_named(project):
    ja(project).write_text("msgid broken\n")
    with pytest.raises(ValueError, match=r"masks\.po"):
        read_catalog(ja(project), "ja")


NONE = Glossary((), frozenset())
FINE = [
    ("Read `key` and $x$.", "読むのは `key` と $x$ です。", "ja"),
    ("Read `key` and $x$.", "读取 `key` 和 $x$。", "zh_CN"),
    ("As in [vaswani2017], Eq. 1.", "[vaswani2017] の式 1 と同じです。", "ja"),
    ("Use `mask.bool()`", "`mask.bool()` を使う", "ja"),
    ("Transformer", "Transformer", "zh_CN"),
    ("`x`: a tensor (or none), as [here](a.py).", "`x`：张量（或无），见[这里](a.py)。", "zh_CN"),
    ("![One bar.](a.svg)", "![一根条。](a.svg)", "zh_CN"),
    ("It is 3.5 times, see Fig. 2 (b).", "3.5 倍です（図 2 の (b) を参照）。", "ja"),
]
SEEDED = [
    ("code missing", "Read `key`.", "キーを読みます。", "ja"),
    ("code not in the English", "Read.", "`key` を読みます。", "ja"),
    ("formula missing", "Take $x$ and $y$.", "$x$ を取ります。", "ja"),
    ("formula not in the English", "Take $x$.", "取 $y$。", "zh_CN"),
    ("link missing", "See [it](a.py).", "それを参照。", "ja"),
    ("link not in the English", "See [it](a.py).", "见[它](b.py)。", "zh_CN"),
    ("link missing", "As in [zhai2021].", "論文と同じです。", "ja"),
    ("wrong rendering of 'dropout'", "Apply dropout.", "应用辍学。", "zh_CN"),
    ("wrong rendering of 'mask'", "Masks are boolean.", "面具是布尔值。", "zh_CN"),
    ("wrong rendering of 'Transformer'", "A Transformer.", "変圧器です。", "ja"),
    ("wrong rendering of 'gradient'", "The gradients vanish.", "グラデーションが消えます。", "ja"),
    ("punctuation torn off", "Read `key`.", "`key` を読みます 。", "ja"),
    ("punctuation torn off", "Read it.", "读取（ 它）。", "zh_CN"),
    ("closing punctuation is missing", "Read it.", "読みます", "ja"),
    ("identifier follows the closing", "Read `key` first.", "まず読みます。`key`", "ja"),
    ("half-width punctuation", "One, two.", "一,二。", "zh_CN"),
    ("half-width punctuation", "One (two).", "一(二)。", "zh_CN"),
    ("full-width letters", "Size 16.", "大小１６。", "zh_CN"),
    ("full-width letters", "A key.", "ｷｰです。", "ja"),
    ("opens full-width", "One (two).", "一（二)。", "zh_CN"),
    ("equals the English", "This is a sentence.", "This is a sentence.", "ja"),
]


@pytest.mark.parametrize(("english", "translated", "language"), FINE)
def test_good_translations_pass(english, translated, language):
    assert list(faults_of(english, translated, language, read_glossary(GLOSSARY, language))) == []


@pytest.mark.parametrize(("fault", "english", "translated", "language"), SEEDED)
def test_every_seeded_fault_is_found(fault, english, translated, language):
    found = list(faults_of(english, translated, language, read_glossary(GLOSSARY, language)))
    assert any(fault in one for one in found), found


def test_our_glossary_is_whole():
    for language in ("zh_CN", "ja"):
        glossary = read_glossary(GLOSSARY, language)
        assert len(glossary.terms) > 35
    assert read_glossary(GLOSSARY.with_name("missing.csv"), "ja") == NONE


# One seeded fault of each kind, through the command that everybody uses.
def test_check_finds_every_kind_of_fault(project):
    assert all("not translated" in str(f) for f in check_project(open_project(project / "pkg")))
    assert check_project(open_project(project / "pkg"), complete=False) == []
    says(ja(project), "ja", {"A *mask* says which `key` is read, $T$ by $S$.": "マスク。`key`"})
    (project / "pkg/bad.py").write_text("# $\\frac{a$ and [it](#gone) and [x](gone.py)\nx = 1\n")
    (project / "pkg/worse.py").write_text("x = (\n")
    (project / "site.css").write_text(":root {\n  --muted: #999999;\n}\n")
    (project / "pages.toml").write_text('languages = ["ja", "zh_CN"]\nstylesheet = "site.css"\n')
    found = "\n".join(map(str, check_project(open_project(project / "pkg"), complete=False)))
    for expected in (
        "pkg/bad.py:1: mathematics",
        "pkg/bad.py:1: a link to 'gone': bad.html has no such anchor",
        "pkg/bad.py:1: a link to 'gone.py' leads nowhere",
        "pkg/worse.py:1:",
        "locale/ja/LC_MESSAGES/masks.po:",
        "formula missing: $S$, $T$",
        "an identifier follows the closing punctuation",
        "site.css:2: light: --muted on --page has contrast 2.85, below 4.5",
    ):
        assert expected in found, found
