r"""F3, F4, F6, F17: the order of writing, full disks, file-size limits, and places that cannot be written."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import torch

from postil.training import checkpoints
from postil.training.checkpoints import CheckpointError
from postil.training.run_directory import RunDirectory, RunDirectoryError

MEGABYTE = 300_000  # numbers of 4 bytes


@pytest.mark.case("BC055")
def test_a_full_disk_costs_the_new_checkpoint_and_nothing_else(good, whole, disk, names):
    place = disk("size=2m")
    good.save(place, 10, MEGABYTE)
    with pytest.raises(CheckpointError, match=r"step-00000020: .*No space left on device") as caught:
        good.save(place, 20, MEGABYTE)
    assert str(place) in str(caught.value) and "\n" not in str(caught.value)
    assert names(place) == ["step-00000010"]
    assert whole(good, place, MEGABYTE) == 10
    disk("size=8m")
    good.save(place, 20, MEGABYTE)
    assert whole(good, place, MEGABYTE) == 20


def test_a_full_disk_finds_the_bad_saver_out(bad, whole, disk):
    place = disk("size=2m")
    bad.save(place, 10, MEGABYTE)
    (place / "other").write_bytes(bytes(700_000))
    with pytest.raises(OSError):
        bad.save(place, 20, 2 * MEGABYTE)
    with pytest.raises(safetensors.SafetensorError):
        whole(bad, place, MEGABYTE)


@pytest.mark.case("BC055")
def test_a_limit_on_file_sizes_costs_the_new_checkpoint_and_nothing_else(good, whole, child, tmp_path, names):
    resource = pytest.importorskip("resource")
    good.save(tmp_path, 10, MEGABYTE)

    def trial():
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
        try:
            good.save(tmp_path, 20, MEGABYTE)
        except CheckpointError as error:
            return 3 if "File too large" in str(error) and str(tmp_path) in str(error) else 98
        return 0

    assert child(trial).wait() == 3
    assert names(tmp_path) == ["step-00000010"] and whole(good, tmp_path, MEGABYTE) == 10


def test_a_full_disk_does_not_stop_the_log(disk):
    place = disk("size=2m")
    with RunDirectory.open(place / "run") as run:
        assert run.log({"step": 1})
        filler = place / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        with pytest.warns(RuntimeWarning, match=r"metrics.jsonl: cannot be written: No space"):
            written = [run.log({"step": step, "text": "x" * 500}) for step in range(2, 30)]
        assert not all(written) and run.lost_lines == written.count(False)
        filler.unlink()
        assert run.log({"step": 30})
        assert run.cut_metrics(30) == 0
        steps = [line for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        assert len(steps) == 2 + written.count(True)


def test_a_read_only_place_is_found_out_before_training(good, whole, disk, tmp_path):
    place = disk("size=4m")
    good.save(place / "run" / "checkpoints", 10)
    disk("ro")
    for path in (place / "run", place / "new", place):
        with pytest.raises(RunDirectoryError, match="cannot be written: Read-only file system"):
            RunDirectory.open(path, resume=True)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        good.save(place / "run" / "checkpoints", 20)
    # Reading needs no right to write.
    assert whole(good, place / "run" / "checkpoints") == 10


def test_too_little_memory_costs_the_new_checkpoint_and_nothing_else(good, whole, child, tmp_path, names):
    resource = pytest.importorskip("resource")
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    good.save(tmp_path, 10)

    def trial():
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
        # A view of one number that takes 400 MB when it is written out.
        try:
            checkpoints.save(tmp_path, 20, {"model": {"wide": torch.ones(1).expand(100_000_000)}}, {})
        except checkpoints.CheckpointError as error:
            return 3 if "memory" in str(error) and str(tmp_path) in str(error) else 98
        return 0

    assert child(trial).wait() == 3
    assert names(tmp_path) == ["step-00000010"] and whole(good, tmp_path) == 10


class Disk:
    r"""Follows the calls of a save and knows what would survive a power cut at any moment."""

    def __init__(self):
        self.unsynced: set[str] = set()
        self.wrong: list[str] = []
        self.published: list[str] = []
        self.unnamed: set[str] = set()

    def write(self, path):
        self.unsynced.add(path)
        if re.search(r"/step-\d+/", path):
            self.wrong.append(f"writes to the final name {path}")

    def create(self, path):
        self.write(path)
        self.unsynced.add(str(Path(path).parent))

    # The last checkpoint must have its name for good before work on the next one begins.
    def begin(self, path):
        late = [name for name in self.unnamed if Path(name).parent == Path(path).parent]
        self.wrong += [f"the name {name} is not synced" for name in late]
        self.unsynced |= {path, str(Path(path).parent)}

    def fsync(self, path):
        self.unsynced.discard(path)
        self.unnamed = {name for name in self.unnamed if str(Path(name).parent) != path}

    def rename(self, old, new):
        if re.fullmatch(r"step-\d+", Path(new).name):
            inside = {path for path in self.unsynced if path == old or path.startswith(old + "/")}
            self.wrong += [f"{path} is not synced before the rename" for path in inside]
            self.published.append(new)
            self.unnamed.add(new)
        self.unsynced = {re.sub("^" + re.escape(old) + "(?=/|$)", new, path) for path in self.unsynced}
        self.unsynced |= {str(Path(old).parent), str(Path(new).parent)}

    def end(self):
        return [*self.wrong, *(f"the name {path} is not synced" for path in self.unnamed)]


def follow(trace):
    r"""Play the lines of `strace -y` on a `Disk`."""
    disk = Disk()
    for line in trace:
        if " = -1 " in line:
            continue
        texts = re.findall(r'"((?:[^"\\]|\\.)*)"', line)
        opened = re.search(r"<([^<>]*)>", line)
        call = re.search(r"(\w+)\(", line)
        name = call.group(1) if call else ""
        if name == "openat" and re.search(r"O_CREAT|O_TRUNC", line):
            disk.create(texts[0])
        elif name == "mkdir":
            disk.begin(texts[0])
        elif name in ("write", "pwrite64", "ftruncate") and opened:
            disk.write(opened.group(1))
        elif name in ("fsync", "fdatasync") and opened:
            disk.fsync(opened.group(1))
        elif name.startswith("rename"):
            disk.rename(texts[0], texts[1])
    return disk


SAVE = (
    "import sys, pathlib, torch\n"
    "from postil.training import checkpoints\n"
    "checkpoints.save(sys.argv[1], 10, {'model': {'a': torch.ones(9)}}, {})\n"
    "checkpoints.save(sys.argv[1], 20, {'model': {'a': torch.ones(9)}}, {}, keep=1)\n"
)
IN_PLACE = (
    "import sys, pathlib, torch, safetensors.torch\n"
    "path = pathlib.Path(sys.argv[1]) / 'step-10'\n"
    "path.mkdir(parents=True)\n"
    "(path / 'model').write_bytes(safetensors.torch.save({'a': torch.ones(9)}))\n"
)


def traced(code, directory):
    if not shutil.which("strace"):
        pytest.skip("needs strace")
    calls = "openat,mkdir,write,pwrite64,ftruncate,fsync,fdatasync,rename,renameat,renameat2"
    trace = directory.with_name("trace")
    strace = ["strace", "-f", "-y", "-s", "4096", "-e", f"trace={calls}", "-o", trace]
    done = subprocess.run([*strace, sys.executable, "-c", code, directory], capture_output=True, text=True)
    if done.returncode and "ptrace" in done.stderr:
        pytest.skip("strace is not allowed here")
    assert done.returncode == 0, done.stderr
    return [line for line in trace.read_text(errors="replace").splitlines() if str(directory) in line]


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path):
    trace = traced(SAVE, tmp_path / "run")
    disk = follow(trace)
    assert disk.end() == []
    assert [Path(path).name for path in disk.published] == ["step-00000010", "step-00000020"]
    # The test bites: without any single one of these syncs it finds something wrong.
    syncs = [position for position, line in enumerate(trace) if "fsync(" in line]
    assert len(syncs) == 2 * 5
    for position in syncs:
        assert follow(trace[:position] + trace[position + 1 :]).end() != [], trace[position]


def test_the_order_of_the_bad_saver_is_found_out(tmp_path):
    disk = follow(traced(IN_PLACE, tmp_path / "run"))
    assert any("final name" in each for each in disk.end())
