from __future__ import annotations

from pathlib import Path

import pytest

from postil import durable
from postil.text.reading import TextError
from postil.text.storage import atomic_file


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
    # No process has this id: it is larger than any system gives out.
    dead = tmp_path / f".postil-file~{durable.HOST}~4194305~1~0123abcd"
    alive = durable.temporary_beside(tmp_path / "file")
    foreign = tmp_path / ".other.part"
    for path in (dead, alive, foreign):
        path.write_bytes(b"")
    with atomic_file(tmp_path / "file"):
        pass
    assert {entry.name for entry in tmp_path.iterdir()} == {"file", alive.name, foreign.name}
