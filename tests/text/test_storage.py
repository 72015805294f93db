from __future__ import annotations

import os
from pathlib import Path

import pytest

from postil.text.reading import TextError
from postil.text.storage import atomic_file, safe_name, safe_path


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
    with pytest.raises(TextError, match="data set") as caught:
        safe_name(name, "data set")
    assert repr(name) in str(caught.value)
    with pytest.raises(TextError):
        safe_path(tmp_path / "base", name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "tiny-shakespeare", "run_1.2", "-", "A" * 100])
def test_plain_names_pass(name: str, tmp_path: Path):
    assert safe_path(tmp_path, name) == tmp_path / name


@pytest.mark.case("BC134")
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "escape").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TextError, match="escape"):
        safe_path(base, "escape")


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "new" / "file.bin"
    with atomic_file(path) as file:
        file.write(b"old")
        assert not path.exists()
    assert path.read_bytes() == b"old"
    with pytest.raises(RuntimeError), atomic_file(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.bin"]


def test_a_link_at_the_place_is_replaced_not_followed(tmp_path: Path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"precious")
    link.symlink_to(target)
    with atomic_file(link) as file:
        file.write(b"new")
    assert target.read_bytes() == b"precious" and link.read_bytes() == b"new" and not link.is_symlink()


def test_an_unwritable_place_is_a_clear_error(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with (
        pytest.raises(TextError, match=r"cannot write .*POSTIL_CACHE"),
        atomic_file(tmp_path / "file" / "below"),
    ):
        pass


def test_a_full_disk_is_a_clear_error(tmp_path: Path):
    with pytest.raises(TextError, match="cannot write"), atomic_file(tmp_path / "file"):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_process_are_removed_and_live_ones_kept(tmp_path: Path):
    old, young = tmp_path / ".file.aaa.part", tmp_path / ".file.bbb.part"
    old.write_bytes(b"")
    young.write_bytes(b"")
    os.utime(old, (0, 0))
    with atomic_file(tmp_path / "file"):
        pass
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".file.bbb.part", "file"]
