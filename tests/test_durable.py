"""Names are not paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from postil import durable


@pytest.mark.case("BC134")
@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/../../x",
        "/etc/hostname",
        "..",
        ".",
        "",
        ".hidden",
        "a/b",
        "a\\b",
        "a\0b",
        "a\n",
        "C:x",
        "é",
        "a" * 101,
    ],
)
def test_a_name_is_not_a_path(name: str, tmp_path: Path):
    with pytest.raises(ValueError, match="data set") as caught:
        durable.check_name(name, "data set")
    assert repr(name) in str(caught.value)
    with pytest.raises(ValueError):
        durable.inside(tmp_path / "base", name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "tiny-shakespeare", "run_1.2", "-", "A" * 100])
def test_plain_names_pass(name: str, tmp_path: Path):
    assert durable.inside(tmp_path, name) == tmp_path / name


@pytest.mark.case("BC134")
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "escape").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="escape"):
        durable.inside(base, "escape")
