"""Trackers file the run's own lines, continue after a resume, and never stop a training."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from postil.training.trackers import TRACKERS, Trackers, open_trackers

TRAIN = {"kind": "train", "update": 1, "tokens": 64, "seconds": 0.5, "loss": 2.5, "bits": 3.6, "lr": 0.01}
VALID = {
    "kind": "valid",
    "update": 2,
    "tokens": 128,
    "seconds": 0.9,
    "loss": 2.25,
    "bits": 3.25,
    "accuracy": 0.5,
}


def logged(kinds, path, lines, update=0):
    trackers = open_trackers(
        kinds, path, name="small", settings={"mixer": "m", "model": {"d": 8}}, update=update
    )
    for line in lines:
        trackers.log(line)
    trackers.close()


def table(path):
    with (path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_is_a_table_of_all_lines(tmp_path):
    logged(["csv"], tmp_path, [TRAIN, VALID])
    rows = table(tmp_path)
    assert [row["kind"] for row in rows] == ["train", "valid"]
    assert float(rows[0]["loss"]) == 2.5 and float(rows[1]["accuracy"]) == 0.5
    assert rows[0]["accuracy"] == "" and rows[1]["lr"] == ""


def test_a_resumed_csv_has_each_update_once(tmp_path):
    logged(["csv"], tmp_path, [{**TRAIN, "update": update} for update in range(1, 8)])
    logged(["csv"], tmp_path, [{**TRAIN, "update": update} for update in range(5, 10)], update=4)
    assert [int(row["update"]) for row in table(tmp_path)] == list(range(1, 10))
    logged(["csv"], tmp_path, [VALID])
    assert [int(row["update"]) for row in table(tmp_path)] == [2]


def test_tensorboard_reads_the_numbers_back(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra track")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged(["tensorboard"], tmp_path, [TRAIN, VALID])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.5)]
    assert [(e.step, e.value) for e in events.Scalars("valid/accuracy")] == [(2, 0.5)]
    assert "train/kind" not in events.Tags()["scalars"]


def test_wandb_offline_keeps_the_run_in_its_folder(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged(["wandb"], tmp_path, [TRAIN, VALID])
    identity = (tmp_path / "wandb-id").read_text()
    [record] = (tmp_path / "wandb").glob(f"offline-run-*/run-{identity}.wandb")
    data = record.read_bytes()
    assert b"train/loss" in data and b"valid/accuracy" in data
    logged(["wandb"], tmp_path, [VALID], update=1)
    assert (tmp_path / "wandb-id").read_text() == identity


def test_trackio_keeps_the_numbers(tmp_path):
    pytest.importorskip("trackio", reason="needs trackio")
    # Its folder is chosen when it is imported, so it runs in a process of its own.
    program = f"""
import json, os
os.environ["TRACKIO_DIR"] = {str(tmp_path / "trackio")!r}
from postil.training.trackers import open_trackers
trackers = open_trackers(["trackio"], {str(tmp_path)!r}, name="small", settings={{"mixer": "m"}})
for line in {[TRAIN, VALID]!r}:
    trackers.log(line)
trackers.close()
import trackio
runs = trackio.Api().runs("postil")
print("RESULT " + json.dumps(trackio.sqlite_storage.SQLiteStorage.get_logs("postil", runs[0].name)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    [result] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")] or [done.stderr]
    logs = json.loads(result.removeprefix("RESULT "))
    found = {name: value for entry in logs for name, value in entry.items()}
    assert found["train/loss"] == 2.5 and found["valid/accuracy"] == 0.5


def test_a_failing_tracker_is_left_and_the_others_go_on(tmp_path):
    class Broken:
        calls = 0

        def log(self, line):
            self.calls += 1
            raise OSError("no space left")

        def close(self):
            raise AssertionError("closed after it failed")

    class Good:
        lines = 0

        def log(self, line):
            self.lines += 1

        def close(self):
            self.lines += 10

    broken, good = Broken(), Good()
    trackers = Trackers({"broken": broken, "good": good})
    with pytest.warns(RuntimeWarning, match="broken: no space left; training goes on"):
        trackers.log(TRAIN)
    trackers.log(VALID)
    trackers.close()
    assert (broken.calls, good.lines) == (1, 12)


def test_unknown_and_missing_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="'excel' is not known; there are csv"):
        open_trackers(["excel"], tmp_path, name="n", settings={})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match="pip install 'wandb'"):
        open_trackers(["wandb"], tmp_path, name="n", settings={})
    assert set(TRACKERS) == {"csv", "tensorboard", "wandb", "trackio"}


def test_only_what_is_chosen_is_imported(tmp_path):
    program = f"""
import sys
from postil.training.trackers import open_trackers
open_trackers(["csv"], {str(tmp_path)!r}, name="n", settings={{}}).log({TRAIN!r})
print([name for name in ("wandb", "trackio", "tensorboard", "transformers", "onnx") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_run_hands_its_lines_to_its_trackers(settings) -> None:
    import csv

    from quietly import run

    outcome = run(settings(trackers=["csv"]))
    with (outcome.path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    metrics = (outcome.path / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == len(metrics) > 20
    assert rows[-1]["kind"] == "final" and float(rows[-1]["bits"]) == outcome.bits


def test_an_unknown_tracker_is_named(settings) -> None:
    from quietly import run

    s = settings(trackers=["paper"])
    with pytest.raises(ValueError, match="tracker='paper' is not known; there are csv"):
        run(s)
    assert not Path(s.out).exists()
