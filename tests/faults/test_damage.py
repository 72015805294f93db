r"""F5, F11: damaged files, and clocks that lie."""

import os
import random
import shutil

import pytest
import safetensors

from postil.training import checkpoints
from postil.training.checkpoints import CheckpointError, CheckpointWarning


def undetected(saver, directory, flips, seed, files=None):
    r"""Flip one bit at a time; return how many flips the saver read without a word."""
    places = random.Random(seed)
    files = files or [path for path in sorted(directory.rglob("*")) if path.is_file()]
    weights = [path.stat().st_size for path in files]
    passed = 0
    for _ in range(flips):
        (path,) = places.choices(files, weights)
        original = path.read_bytes()
        damaged = bytearray(original)
        damaged[places.randrange(len(damaged))] ^= 1 << places.randrange(8)
        path.write_bytes(damaged)
        try:
            saver.latest(directory)
            passed += 1
        except Exception as error:
            if not isinstance(error, CheckpointError):
                assert type(saver).__name__ == "Bad", repr(error)
            else:
                assert path.name in str(error) and "\n" not in str(error), error
        path.write_bytes(original)
    saver.latest(directory)
    return passed


@pytest.mark.case("BC058")
def test_every_flipped_bit_is_detected(good, tmp_path, figure):
    good.save(tmp_path, 10)
    path = tmp_path / "step-00000010"
    passed = [undetected(good, tmp_path, 200, seed=5)]
    for name in ("manifest.json", "metadata.json", "model.safetensors"):
        passed.append(undetected(good, tmp_path, 200, seed=6, files=[path / name]))
    figure(flips=200 * len(passed), detected=200 * len(passed) - sum(passed))
    assert sum(passed) == 0


@pytest.mark.case("BC058")
def test_no_byte_of_the_manifest_may_change(good, tmp_path):
    good.save(tmp_path, 10)
    manifest = tmp_path / "step-00000010" / "manifest.json"
    original = manifest.read_bytes()
    for position in range(len(original)):
        for bit in (1, 32, 128):
            manifest.write_bytes(
                original[:position] + bytes([original[position] ^ bit]) + original[position + 1 :]
            )
            with pytest.raises(CheckpointError, match=r"manifest\.json"):
                checkpoints.load(manifest.parent)


def test_flipped_bits_in_the_bad_saver_are_found_out(bad, tmp_path, figure):
    bad.save(tmp_path, 10)
    passed = undetected(bad, tmp_path, 50, seed=5)
    figure(flips=50, detected=50 - passed)
    assert passed > 0


def damages(path):
    size = path.stat().st_size
    for share in (0, 0.001, 0.5, 0.9999):
        yield f"cut to {share:.2%}", lambda share=share: os.truncate(path, min(int(size * share), size - 1))
    yield "longer", lambda: path.write_bytes(path.read_bytes() + b"\0")
    yield "text", lambda: path.write_text("This is not the file you are looking for.\n")
    yield "missing", path.unlink
    yield "a folder", lambda: (path.unlink(), path.mkdir())
    yield "zeros", lambda: path.write_bytes(bytes(size))
    yield "unreadable names", lambda: path.write_bytes(bytes(range(256)) * 4)


@pytest.mark.parametrize("name", ["manifest.json", "metadata.json", "model.safetensors"])
def test_every_other_damage_is_detected_and_the_one_before_is_taken(good, whole, tmp_path, name):
    for position in range(10):
        run = tmp_path / str(position)
        good.save(run, 10)
        good.save(run, 20, keep=2)
        newest = run / "step-00000020"
        what, damage = list(damages(newest / name))[position]
        damage()
        with pytest.raises(CheckpointError, match=name) as caught:
            checkpoints.load(newest)
        assert "\n" not in str(caught.value), what
        with pytest.warns(CheckpointWarning, match="step-00000020"):
            assert whole(good, run) == 10, what


def test_a_cut_file_of_the_bad_saver_loads_nothing(bad, tmp_path):
    bad.save(tmp_path, 10)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(safetensors.SafetensorError):
        bad.latest(tmp_path)


def test_the_latest_is_by_step_whatever_the_files_times_say(good, whole, tmp_path):
    for step in (9, 10, 11):
        good.save(tmp_path, step, keep=3)
    for step, time in ((9, 4_102_444_800), (10, 0), (11, 1)):
        for path in [*(tmp_path / f"step-{step:08d}").iterdir(), tmp_path / f"step-{step:08d}"]:
            os.utime(path, (time, time))
    assert whole(good, tmp_path) == 11
    good.save(tmp_path, 12, keep=2)
    assert [path.name for path in checkpoints.steps(tmp_path)] == ["step-00000011", "step-00000012"]


def test_a_copied_checkpoint_is_as_good(good, whole, tmp_path):
    good.save(tmp_path / "a", 10)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert whole(good, tmp_path / "b") == 10
    (tmp_path / "b" / "step-00000010").rename(tmp_path / "mine")
    assert checkpoints.load(tmp_path / "mine").step == 10
