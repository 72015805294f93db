"""`postil bench`: finds suites and results, shows their ratios, and never measures in a test."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from postil.cli import bench, main

ROW = {"what": "forward", "T": 256, "B": 32, "D": 256, "threads": 1}


def repository(tmp_path: Path, rows: list | None = None) -> Path:
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    script = "import json, sys, pathlib; pathlib.Path('said.json').write_text(json.dumps(sys.argv[1:]))\n"
    (tmp_path / "benchmarks/aft.py").write_text(script + "sys.exit(7 if '--fail' in sys.argv else 0)\n")
    (tmp_path / "benchmarks/measure.py").write_text("")
    if rows is not None:
        machine = {"processor": "a processor", "torch": "2", "date": "2026-01-01"}
        document = {"machine": machine, "command": "x", "rows": rows}
        (tmp_path / "benchmarks/results/aft-quick.json").write_text(json.dumps(document))
    return tmp_path


def test_ratios_of_rows():
    row = ROW | {"ratio": {"median": 1.5, "quartiles": [1.4, 1.6]}, "times": {"a": {"median": 9.0}}}
    assert bench.ratios(row) == [("forward", "T=256 B=32 D=256", 1.5)]
    row = ROW | {"over_linear_layers": {"median": 1.2}, "times_slower_than_AFTLocal": {"peer": 3, "own": 1.0}}
    assert [(what, ratio) for what, _, ratio in bench.ratios(row)] == [
        ("forward, over_linear_layers", 1.2),
        ("forward, times slower than AFTLocal: peer", 3.0),
        ("forward, times slower than AFTLocal: own", 1.0),
    ]
    row = ROW | {"what": "memory", "name": "peer", "bytes": 9, "units_of_TBD": 3.5, "threads": 2}
    assert bench.ratios(row) == [("memory: peer", "T=256 B=32 D=256 threads=2", 3.5)]
    row = {"what": "decoding", "sizes": {"D": 8, "L": 2}, "ratio": {"median": 2.0}, "seconds": {"a": 1.0}}
    assert bench.ratios(row) == [("decoding", "D=8 L=2", 2.0)]


def test_results_are_shown_and_drawn(tmp_path, monkeypatch, capsys):
    root = repository(tmp_path, [ROW | {"ratio": {"median": 1.5}}])
    monkeypatch.setattr(bench, "REPOSITORY", root)
    monkeypatch.setattr(bench, "suites", lambda: ["aft"])
    monkeypatch.setattr(bench, "results", lambda suite: sorted((root / "benchmarks/results").glob("*.json")))
    assert main(["bench", "aft", "--show"]) == 0
    shown = capsys.readouterr().out
    assert "1.50" in shown and "a processor" in shown
    assert (root / "benchmarks/results/aft-quick.svg").read_text().count("<svg") == 1


def test_suites_and_results_are_found(tmp_path):
    root = repository(tmp_path, [])
    (root / "benchmarks/results/transformer.json").write_text("{}")
    (root / "benchmarks/results/aft-images.json").write_text("{}")
    assert bench.suites(root) == ["aft"]
    assert [path.name for path in bench.results("aft", root)] == ["aft-quick.json"]
    assert bench.suites(tmp_path / "elsewhere") == []


def test_what_is_not_there(tmp_path, monkeypatch, capsys):
    root = repository(tmp_path)
    monkeypatch.setattr(bench, "REPOSITORY", root)
    monkeypatch.setattr(bench, "suites", lambda: ["aft"])
    monkeypatch.setattr(bench, "results", lambda suite: [])
    assert main(["bench", "nope"]) == 2
    assert "'nope' is not a suite; there are aft" in capsys.readouterr().err
    assert main(["bench", "aft"]) == 2
    assert "make peers" in capsys.readouterr().err
    assert main(["bench", "aft", "--show"]) == 2
    assert "no results of aft" in capsys.readouterr().err


def test_a_suite_runs_in_the_peers_environment(tmp_path, monkeypatch):
    root = repository(tmp_path)
    monkeypatch.setattr(bench, "REPOSITORY", root)
    monkeypatch.chdir(tmp_path)
    (root / ".venv-peers/bin").mkdir(parents=True)
    python = root / ".venv-peers/bin/python"
    python.write_text('#!/bin/sh\necho "$PYTHONPATH" > pythonpath\nexec python3 "$@"\n')
    python.chmod(0o755)
    assert bench._measure("aft", ["--quick", "--rounds", "3"]) == 0
    assert json.loads((tmp_path / "said.json").read_text()) == ["--quick", "--rounds", "3"]
    assert (tmp_path / "pythonpath").read_text().strip() == str(root / "src")
    assert bench._measure("aft", ["--fail"]) == 7


def gpu(tmp_path: Path, python: str, *options: str) -> subprocess.CompletedProcess:
    """Run the script with a Python that only writes down what it was asked to run."""
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{python}\n")
    fake.chmod(0o755)
    script = Path(__file__).parents[2] / "benchmarks/gpu.sh"
    environment = {"PYTHON": str(fake), "PATH": "/usr/bin:/bin"}
    return subprocess.run(["sh", script, *options], env=environment, capture_output=True, text=True)


# The second question that the script asks is whether torch finds a GPU.
NO_GPU = """case "$*" in *is_available*) exit 1 ;; -c*) exit 0 ;; esac; echo "ran $*" """


def test_gpu_script_says_what_it_needs(tmp_path):
    done = gpu(tmp_path, NO_GPU)
    assert done.returncode == 2 and "finds no GPU" in done.stderr and "--quick" in done.stderr
    done = gpu(tmp_path, "exit 1")
    assert done.returncode == 2 and "has no torch" in done.stderr
    assert gpu(tmp_path, NO_GPU, "--slow").returncode == 2


def test_gpu_script_runs_every_suite(tmp_path):
    for options, python in ((["--quick"], NO_GPU), ([], 'case "$1" in -c) ;; *) echo "ran $*" ;; esac')):
        done = gpu(tmp_path, python, *options)
        assert done.returncode == 0, done.stderr
        ran = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ran")]
        assert sorted(name.split("/")[1][:-3] for name, *_ in ran) == sorted(bench.SUITES)
        for name, *flags in ran:
            source = (Path(__file__).parents[2] / name).read_text()
            assert all(f'"{flag}"' in source for flag in flags if flag.startswith("--"))
    # One that fails takes no other with it, and is counted.
    done = gpu(tmp_path, 'case "$*" in *aft.py*) exit 3 ;; -c*) ;; *) echo "ran $*" ;; esac')
    assert done.returncode == 1 and "benchmarks/aft.py ended with 3" in done.stderr
    assert done.stdout.count("ran ") == len(bench.SUITES) - 1


def test_gpu_script_ends_in_time():
    script = (Path(__file__).parents[2] / "benchmarks/gpu.sh").read_text()
    limits = {name: int(limit) for limit, name in re.findall(r"run (\d+) (benchmarks/\w+\.py)", script)}
    assert len(limits) == len(bench.SUITES) and sum(limits.values()) < 8 * 60
