# ruff: noqa: E501  (payloads and programs in strings are read whole)
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from postil.pages.anchors import read_lock
from postil.pages.checking import check_site
from postil.pages.project import ProjectError, open_project
from postil.pages.site import BuildError, build_site
from postil.pages.staging import StagingError, staged

from .making import project_of

FILES = {
    "__init__.py": '"""Home: a small package."""\n',
    "one.py": 'r"""One: the first.\n\nSee [two](two.py#f) and `two.f`.\n"""\n\nimport os\n\n\n# A note on $x$.\ndef f(x):\n    return x\n',
    "two.py": 'r"""Two: the second."""\n\n\ndef f(x):\n    r"""Give $x^2$."""\n    # Inside, a note.\n    return x * x\n',
}


def contents(site: Path) -> dict[str, bytes]:
    return {f.relative_to(site).as_posix(): f.read_bytes() for f in sorted(site.rglob("*")) if f.is_file()}


def test_a_site_is_whole(tmp_path):
    built = build_site(project_of(tmp_path, FILES), tmp_path / "site")
    assert (built.pages, built.written) == (3, 3)
    assert list(check_site(tmp_path / "site")) == []
    home = (tmp_path / "site/index.html").read_text()
    assert "A small package" in home or "a small package" in home
    one = (tmp_path / "site/one.html").read_text()
    assert 'href="two.html#f"' in one and 'id="f"' in one


@pytest.mark.case("BC129")
def test_every_file_has_a_page_of_its_own(tmp_path):
    names = ["a/__init__.py", "b/__init__.py", "a.py", "A.py", "index.py", "search.py", "__init__.py", "a/index.py", "a/B.py", "a/b.py",
             "Ab.py", "aB.py", "404.py", "a b#?%.py", "é.py"]  # fmt: skip
    project = project_of(tmp_path, {name: f'"""Page of {name}."""\nx = 1\n' for name in names})
    urls = [module.url for module in project.modules]
    assert len({url.casefold() for url in urls}) == len(names)
    assert "search.html" not in urls and "404.html" not in urls
    assert next(m.url for m in project.modules if m.path == "__init__.py") == "index.html"
    build_site(project, tmp_path / "site")
    for module in project.modules:
        assert (
            f"Page of {module.path}".replace("__init__", "__init__")
            in (tmp_path / "site" / module.url).read_text()
        )
    assert list(check_site(tmp_path / "site")) == []


@pytest.mark.case("BC130")
@pytest.mark.parametrize(
    ("note", "line"),
    [
        ("See [it](#nowhere).", 3),
        ("See [it](two.py#nowhere).", 3),
        ("Fine.\n\nSee [it](#same-3).\n\n## Same\n\n## Same", 5),
    ],
)
def test_a_broken_anchor_ends_the_build(tmp_path, note, line):
    files = {**FILES, "one.py": f'r"""One.\n\n{note}\n"""\n'}
    with pytest.raises(BuildError) as error:
        build_site(project_of(tmp_path, files), tmp_path / "site")
    assert str(error.value).startswith(f"pkg/one.py:{line}: ")
    assert not (tmp_path / "site").exists()


@pytest.mark.case("BC130")
def test_equal_headings_get_ids_of_their_own(tmp_path):
    note = "[a](#same) [b](#same-2)\n\n## Same\n\n## Same"
    build_site(
        project_of(tmp_path, {"one.py": f'r"""One.\n\n{note}\n"""\n\n\ndef same():\n    pass\n'}),
        tmp_path / "site",
    )
    assert list(check_site(tmp_path / "site")) == []


@pytest.mark.parametrize("text", ['r"""One.\n\n$\\frac{a$\n"""\n', "# One\n#\n# $\\nosuch{a}$\nx = 1\n"])
def test_bad_mathematics_ends_the_build(tmp_path, text):
    project = project_of(tmp_path, {"one.py": text})
    with pytest.raises(BuildError, match=r"^pkg/one\.py:3: mathematics: "):
        build_site(project, tmp_path / "site")
    built = build_site(project, tmp_path / "site", lenient=True)
    assert len(built.warnings) == 1


def test_an_unknown_paper_ends_the_build(tmp_path):
    with pytest.raises(BuildError, match="paper 'nobody1999'"):
        build_site(
            project_of(tmp_path, {"one.py": '"""One.\n\n:paper: nobody1999\n"""\n'}), tmp_path / "site"
        )


def test_a_file_that_python_cannot_read_is_shown_and_reported(tmp_path):
    project = project_of(tmp_path, {"bad.py": "x = (\n<script>\n", "good.py": "x = 1\n"})
    built = build_site(project, tmp_path / "site")
    (fault,) = built.warnings
    assert str(fault).startswith("pkg/bad.py:")
    page = (tmp_path / "site/bad.html").read_text()
    assert "&lt;script&gt;" in page


def test_a_dead_link_stops_only_who_writes_for_this_publisher(tmp_path):
    text = {"one.py": "# [label](whatever) in a comment.\nx = 1\n"}
    assert len(build_site(project_of(tmp_path / "a", text), tmp_path / "a/site").warnings) == 1
    project = project_of(tmp_path / "b", text)
    (tmp_path / "b/pages.toml").touch()
    with pytest.raises(BuildError, match="leads nowhere"):
        build_site(project, tmp_path / "b/site")


@pytest.mark.case("BC132")
def test_two_builds_are_the_same_bytes(tmp_path):
    found = []
    for i, (seed, zone) in enumerate([("1", "UTC"), ("77", "Asia/Tokyo")]):
        folder = tmp_path / f"copy{i}"
        project_of(folder, FILES)
        (folder / "pages.toml").write_text(
            'title = "T"\nlanguages = ["ja"]\nbase_url = "https://x.example"\nnotebooks = "n"\n'
        )
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TZ": zone}
        command = [
            sys.executable,
            "-m",
            "postil.pages",
            "build",
            str(folder / "pkg"),
            "--out",
            str(folder / "site"),
        ]
        subprocess.run(command, check=True, env=environment, capture_output=True)
        found.append(contents(folder / "site"))
    assert found[0] == found[1]
    assert len(found[0]) > 15


def test_a_second_build_writes_only_what_changed_and_equals_a_fresh_one(tmp_path):
    project_of(tmp_path, FILES)
    build_site(open_project(tmp_path / "pkg"), tmp_path / "site")
    again = build_site(open_project(tmp_path / "pkg"), tmp_path / "site")
    assert (again.written, again.reused) == (0, 3)
    (tmp_path / "pkg/one.py").write_text(FILES["one.py"].replace("A note on", "Another note on"))
    changed = build_site(open_project(tmp_path / "pkg"), tmp_path / "site")
    assert changed.reused == 2
    # What was tampered with is not taken over.
    (tmp_path / "site/two.html").write_text("tampered")
    build_site(open_project(tmp_path / "pkg"), tmp_path / "site")
    build_site(open_project(tmp_path / "pkg"), tmp_path / "fresh")
    here, fresh = contents(tmp_path / "site"), contents(tmp_path / "fresh")
    # The record alone differs: it still knows the anchor that went.
    del here["build.json"], fresh["build.json"]
    here["one.html"] = re.sub(rb'<a id="~[^"]*"></a>', b"", here["one.html"])
    assert here == fresh


def test_nothing_is_imported(tmp_path):
    marker = tmp_path / "marker"
    text = f'"""One."""\nfrom pathlib import Path\nPath({str(marker)!r}).touch()\nraise SystemExit\n'
    build_site(project_of(tmp_path, {"__init__.py": text, "one.py": text}), tmp_path / "site")
    assert not marker.exists()


def test_links_are_not_followed_while_looking_for_files(tmp_path):
    project_of(tmp_path, FILES)
    (tmp_path / "pkg/loop").symlink_to(tmp_path)
    (tmp_path / "outside.py").write_text("SECRET = 1\n")
    (tmp_path / "pkg/alias.py").symlink_to(tmp_path / "outside.py")
    assert {m.path for m in open_project(tmp_path / "pkg").modules} == set(FILES)


@pytest.mark.case("BC134")
@pytest.mark.parametrize(
    "source", ["../../../etc/hostname", "/../../etc/hostname", "../../secret.png", "link.png"]
)
def test_a_picture_comes_from_the_project_only(tmp_path, source):
    home = tmp_path / "home"
    (tmp_path / "secret.png").write_bytes(b"secret")
    project = project_of(home, {"one.py": f'"""One.\n\n![x]({source})\n"""\n'})
    (home / "pkg/link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(BuildError, match="picture"):
        build_site(project, home / "site")
    build_site(project, home / "site", lenient=True)
    assert not any(data == b"secret" for data in contents(home / "site").values())


def test_drawings_become_part_of_the_page_and_pictures_files(tmp_path):
    svg = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"><script>alert(1)</script><path d="M0 0h1" style="stroke:#000"/></svg>'
    files = {
        "one.py": '"""One.\n\n![drawing](a.svg)\n\n![photo](b.png)\n"""\n',
        "a.svg": svg,
        "b.png": b"\x89PNG",
    }
    build_site(project_of(tmp_path, files), tmp_path / "site")
    page = (tmp_path / "site/one.html").read_text()
    assert (
        '<svg role="img" aria-label="drawing"' in page
        and "alert" not in page
        and 'stroke="currentColor"' in page
    )
    (name,) = re.findall(r'src="(_media/[^"]+)" alt="photo"', page)
    assert (tmp_path / "site" / name).read_bytes() == b"\x89PNG"


SECTIONS = '''"""One."""


# ## The equation
#
# Prose of the section.
def f():
    """Do f."""


def g():
    """Do g."""


class C:
    """A class."""

    # ## Inside
    #
    # More prose.
    def method(self):
        """Do it."""


# ## What to try next
#
# This.
'''


def test_a_section_begins_with_its_title(tmp_path):
    build_site(project_of(tmp_path, {"one.py": SECTIONS}), tmp_path / "site")
    page = (tmp_path / "site/one.html").read_text()
    found = re.findall(r"<(h\d)[^>]*>(?:<a[^>]*>)?(?:<code[^>]*>)?([^<]*)", page.partition("<h1")[2])
    assert [(level, text) for level, text in found if text != "On this page"] == [
        ("h2", "The equation"), ("h3", "f"), ("h3", "g"), ("h3", "C"), ("h4", "Inside"), ("h5", "method"), ("h2", "What to try next")
    ]  # fmt: skip
    assert page.index("Prose of the section") < page.index('<h3><a href="#f">') < page.index("<p>Do f.")
    contents = re.findall(r'<li class="(l\d)"><a href="#([^"]*)"', page)
    assert contents == [
        ("l2", "the-equation"),
        ("l3", "f"),
        ("l3", "g"),
        ("l3", "C"),
        ("l2", "what-to-try-next"),
    ]
    # What has no code beside it stands across the page.
    assert page.count('class="row prose"') == 1


def test_the_page_of_a_package_names_its_modules(tmp_path):
    files = {
        "__init__.py": '"""Home: see `one` and `f`."""\n',
        "one.py": '"""One, beside `f`."""\n',
        "two.py": '"""Two."""\n\n\ndef f():\n    pass\n\n\ndef one():\n    pass\n',
        "sub/__init__.py": '"""Sub: of `one`.\n\nAnd `one` again."""\n',
        "sub/one.py": "",
    }
    build_site(
        project_of(tmp_path, {**files, "__init__.py": '"""Home.\n\nSee `one` and `f`."""\n'}),
        tmp_path / "site",
    )
    home = (tmp_path / "site/index.html").read_text()
    assert '<a href="one.html"><code' in home and '<a href="two.html#f"><code' in home
    assert '<a href="one.html"><code' in (tmp_path / "site/sub/index.html").read_text()


def test_a_source_is_in_the_repository_or_in_the_site(tmp_path):
    project = project_of(tmp_path, {"a/__init__.py": "", "a/one.py": "x = 1\n"})
    build_site(project, tmp_path / "site")
    assert 'href="../_sources/a/one.py.txt"' in (tmp_path / "site/a/one.html").read_text()
    assert (tmp_path / "site/_sources/a/one.py.txt").read_text() == "x = 1\n"
    named = dataclasses.replace(project, settings={"repository": "https://x.example/r/"}, commit="abc")
    build_site(named, tmp_path / "other")
    page = (tmp_path / "other/a/one.html").read_text()
    assert 'href="https://x.example/r/blob/abc/pkg/a/one.py"' in page
    assert not (tmp_path / "other/_sources").exists()


# --- anchors ---


def test_permalinks_outlive_edits(tmp_path):
    project_of(tmp_path, FILES)
    build_site(open_project(tmp_path / "pkg"), tmp_path / "site")
    before = {
        i for i in re.findall(r'id="([^"]+)"', (tmp_path / "site/two.html").read_text()) if "page-" not in i
    }
    assert {"f", "f~inside-a-note"} <= before or "f" in before
    edited = (
        FILES["two.py"]
        .replace("def f", "import os\n\n\ndef g():\n    pass\n\n\ndef f")
        .replace("Inside, a note", "Reworded")
    )
    (tmp_path / "pkg/two.py").write_text(edited)
    build_site(open_project(tmp_path / "pkg"), tmp_path / "site")
    after = set(re.findall(r'id="([^"]+)"', (tmp_path / "site/two.html").read_text()))
    assert before <= after
    (tmp_path / "pkg/two.py").write_text('"""Empty now."""\n')
    (tmp_path / "pkg/one.py").write_text("x = 1\n")
    build_site(open_project(tmp_path / "pkg"), tmp_path / "site")
    assert before <= set(re.findall(r'id="([^"]+)"', (tmp_path / "site/two.html").read_text()))


def test_a_lock_file_keeps_anchors_and_may_redirect_them(tmp_path):
    project_of(tmp_path, {"one.py": "def old():\n    pass\n"})
    (tmp_path / "pages.toml").write_text('lock = "anchors.json"\n')
    build_site(open_project(tmp_path / "pkg"), tmp_path / "site")
    lock = read_lock(tmp_path / "anchors.json")
    assert lock == {"one.html": {"old": "old"}}
    (tmp_path / "pkg/one.py").write_text("def a():\n    pass\n\n\ndef new():\n    pass\n")
    (tmp_path / "anchors.json").write_text(json.dumps({"one.html": {"old": "new"}}))
    shutil.rmtree(tmp_path / "site")
    build_site(open_project(tmp_path / "pkg"), tmp_path / "site")
    page = (tmp_path / "site/one.html").read_text()
    assert page.index('id="a"') < page.index('id="new"') < page.index('id="old"')


def test_two_definitions_of_one_name_have_two_anchors(tmp_path):
    build_site(
        project_of(tmp_path, {"one.py": "def f():\n    pass\n\n\ndef f(x):\n    pass\n"}), tmp_path / "site"
    )
    assert {"f", "f~2"} <= set(re.findall(r'id="([^"]+)"', (tmp_path / "site/one.html").read_text()))


# --- a build that dies ---


def test_a_build_that_fails_leaves_the_old_site(tmp_path):
    build_site(project_of(tmp_path, FILES), tmp_path / "site")
    before = contents(tmp_path / "site")
    (tmp_path / "pkg/one.py").write_text("# $\\frac{a$\nx = 1\n")
    with pytest.raises(BuildError):
        build_site(open_project(tmp_path / "pkg"), tmp_path / "site")
    assert contents(tmp_path / "site") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pkg", "pyproject.toml", "site"]


# Ten kills spread over a build; the process is forked after the imports, so that kills meet the build itself.
def test_a_build_that_is_killed_leaves_the_old_site(tmp_path):
    build_site(project_of(tmp_path, FILES), tmp_path / "site")
    old = contents(tmp_path / "site")
    (tmp_path / "pkg/two.py").write_text(FILES["two.py"].replace("Give", "Return"))
    project = open_project(tmp_path / "pkg")
    build_site(project, tmp_path / "fresh")
    expected = contents(tmp_path / "fresh")
    for i in range(10):
        child = os.fork()
        if child == 0:
            try:
                while True:
                    build_site(project, tmp_path / "site")
            finally:
                os._exit(1)
        time.sleep(0.004 * (i + 1) ** 2)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        now = contents(tmp_path / "site")
        same = {name: data for name, data in now.items() if name != "build.json"}
        assert same in ({k: v for k, v in side.items() if k != "build.json"} for side in (old, expected))
    build_site(project, tmp_path / "site")
    final = contents(tmp_path / "site")
    assert {k: v for k, v in final.items() if k != "build.json"} == {
        k: v for k, v in expected.items() if k != "build.json"
    }
    assert not list(tmp_path.glob(".site.building"))


def test_a_full_disk_leaves_the_old_site(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    build_site(project_of(tmp_path, FILES), tmp_path / "site")
    before = contents(tmp_path / "site")

    def fill() -> None:
        with staged(tmp_path / "site") as stage:
            (stage / "page.html").write_text("half")
            Path("/dev/full").write_text("x" * 100_000)

    with pytest.raises(OSError):
        fill()
    assert contents(tmp_path / "site") == before
    assert not list(tmp_path.glob(".site*"))


def test_strangers_are_left_alone(tmp_path):
    project = project_of(tmp_path, FILES)
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.txt").write_text("five years")
    with pytest.raises(StagingError, match="no build of this publisher made"):
        build_site(project, tmp_path / "home")
    assert (tmp_path / "home/thesis.txt").read_text() == "five years"
    with pytest.raises(StagingError, match="is a file"):
        build_site(project, tmp_path / "home/thesis.txt")


def test_two_builds_of_one_site_do_not_mix(tmp_path):
    project = project_of(tmp_path, FILES)
    with staged(tmp_path / "site") as stage:
        (stage / "build.json").write_text("{}")
        with pytest.raises(StagingError, match="under way"):
            build_site(project, tmp_path / "site")


# --- settings ---


@pytest.mark.parametrize(
    ("text", "message"),
    [("colour = 1", "unknown setting 'colour'"), ("title = 1", "should be a str"), ("title =", "pages.toml"), ('papers = "x"', "does not exist")],
)  # fmt: skip
def test_bad_settings_are_named(tmp_path, text, message):
    project_of(tmp_path, FILES)
    (tmp_path / "pages.toml").write_text(text)
    with pytest.raises(ProjectError, match=message):
        open_project(tmp_path / "pkg")


def test_the_order_of_pages_is_that_of_the_list_then_of_names(tmp_path):
    names = ["__init__.py", "a.py", "z/__init__.py", "z/b.py", "z/c.py", "z/a.py", "m.py"]
    project = project_of(tmp_path, dict.fromkeys(names, "x = 1\n"), order=["z", "z.c", "m"])
    assert [m.name for m in project.modules] == ["", "z", "z.c", "z.a", "z.b", "m", "a"]


def test_no_python_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ProjectError, match="holds no Python file"):
        open_project(tmp_path / "empty")
    with pytest.raises(ProjectError, match="does not exist"):
        open_project(tmp_path / "nothing")


def test_machines_are_told_where_things_are(tmp_path):
    project_of(tmp_path, FILES)
    (tmp_path / "pages.toml").write_text(
        'title = "T & t"\nlanguages = ["ja"]\nbase_url = "https://x.example/t/"\norder = ["two", "one"]\n'
    )
    build_site(open_project(tmp_path / "pkg"), tmp_path / "site")
    page = (tmp_path / "site/ja/one.html").read_text()
    assert '<link rel="canonical" href="https://x.example/t/ja/one.html">' in page
    assert '<link rel="alternate" hreflang="en" href="https://x.example/t/one.html">' in page
    assert '<link rel="alternate" hreflang="x-default" href="https://x.example/t/one.html">' in page
    from xml.etree import ElementTree

    tree = ElementTree.parse(tmp_path / "site/sitemap.xml")
    places = [e.text for e in tree.iter("{http://www.sitemaps.org/schemas/sitemap/0.9}loc")]
    assert len(places) == 6 and all(p.startswith("https://x.example/t/") for p in places)
    lines = (tmp_path / "site/llms.txt").read_text().splitlines()
    assert lines[0] == "# T & t"
    assert lines[-2:] == [
        "- [Two](https://x.example/t/two.html): the second",
        "- [One](https://x.example/t/one.html): the first",
    ]
    assert "default-src 'self'" in page


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_package_of_others_builds(tmp_path):
    import pygments

    built = build_site(open_project(Path(pygments.__file__).parent), tmp_path / "site")
    assert built.pages > 50
    assert list(check_site(tmp_path / "site")) == []
