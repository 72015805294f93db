"""A text larger than memory trains: only the windows of an update are ever in memory."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

# The limit counts everything that a process may write to: heap, stacks, buffers, and PyTorch's own. Python
# sets it before PyTorch is imported.
TRAIN = """
import resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
from postil.cli import main
code = main(["train", f"--config={sys.argv[2]}"])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""


def made_text(path: Path, size: int) -> None:
    """Paragraphs of a small vocabulary, repeated in another order each time."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(500)]
    lines = [" ".join(draw.choices(words, k=12)) + ".\n" for _ in range(20_000)]
    with path.open("w") as file:
        while file.tell() < size:
            draw.shuffle(lines)
            file.writelines(lines)
        file.truncate(size)


def trained(settings, text: Path, limit: int, updates: int) -> int:
    s = settings(
        text=str(text), out=str(text.with_suffix("")), updates=updates, evaluate_every=100, sample_every=0
    )
    # The last evaluation reads all of the validation text, and is not what is tested.
    s.data.valid_fraction = 2e-5
    record = text.with_suffix(".json")
    record.write_text(json.dumps(s.to_dict()))
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, str(limit), str(record)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"all updates made, {updates} so far" in done.stdout
    return int(done.stdout.rpartition("peak ")[2])


@pytest.mark.skipif(sys.platform != "linux", reason="this limit counts what it should only on Linux")
def test_memory_does_not_grow_with_the_text(settings, tmp_path: Path, figure) -> None:
    peaks = []
    for name, size in (("small", 1_000_000), ("large", 65_000_000)):
        made_text(tmp_path / f"{name}.txt", size)
        peaks.append(trained(settings, tmp_path / f"{name}.txt", 2**31, updates=5))
    figure(megabytes_more=round((peaks[1] - peaks[0]) / 1e6))
    # The text alone would be 64 MB more, its tokens as much again. What may grow is one block of a file.
    assert peaks[1] - peaks[0] < 32e6


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="this limit counts what it should only on Linux")
def test_a_gigabyte_trains_for_200_updates_in_2_gb(settings, tmp_path: Path, figure) -> None:
    made_text(tmp_path / "text.txt", 10**9)
    began = time.monotonic()
    peak = trained(settings, tmp_path / "text.txt", 2 * 10**9, updates=200)
    figure(megabytes=round(peak / 1e6), seconds=round(time.monotonic() - began))
    assert peak < 2e9
