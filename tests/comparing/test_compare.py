"""A comparison as a person meets it: fair, resumable, and with one report in five forms."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from postil.cli import main
from postil.cli.compare import own_settings
from postil.comparing import as_markdown, as_page, as_table, compare, curve_files, plan
from postil.comparing import running as running_module
from postil.experiments import EXPERIMENTS
from postil.leaflet import data_block
from postil.registry import build_language_model
from postil.training.settings import settings_from_dict

QUIET = Console(quiet=True)


def settings(text: Path, mixer: str, **changes):
    own = own_settings(mixer, "demo")
    model = replace(own.model, d_model=8, heads=2, n_layers=1, seq_len=16, **changes.pop("model", {}))
    optimizer = replace(own.optimizer, batch_size=4, warmup=5, lr=1e-2)
    return replace(
        own,
        **{"text": str(text), "max_tokens": 64 * 12, "evaluate_every": 4, "prompt": "the ", "threads": 1}
        | {"accelerator": "cpu", "model": model, "optimizer": optimizer}
        | changes,
    )


@pytest.fixture
def unmeasured(monkeypatch):
    """Speed and memory are not what these tests are about, and take most of the time."""

    def measure(contenders, rounds):
        rate = {"median": 1000.0, "quartiles": [900.0, 1100.0]}
        row = {"training_tokens_per_second": rate, "sampling_tokens_per_second": rate}
        return {each.name: {**row, "state_bytes": 512, "peak_bytes": None} for each in contenders}

    monkeypatch.setattr(running_module, "measure", measure)


def test_the_whole_command(flags, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["compare", "multi-head-attention", "aft-simple", "--experiment=demo", "--seeds=1,2"]
    assert main([*command, *flags, "--max-tokens=768", f"--out={out}"]) == 0
    assert "aft-simple" in capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())
    attention, simple = results["contenders"]
    for each in (attention, simple):
        assert [run["seed"] for run in each["runs"]] == [1, 2]
        assert all(run["tokens"] == 768 for run in each["runs"])
        bits = [run["bits"] for run in each["runs"]]
        assert bits[0] != bits[1] and each["bits"]["mean"] == pytest.approx(sum(bits) / 2)
        assert each["bits"]["deviation"] == pytest.approx(abs(bits[0] - bits[1]) / 2**0.5)
        low, high = each["training_tokens_per_second"]["quartiles"]
        assert 0 < low <= each["training_tokens_per_second"]["median"] <= high
        assert each["peak_bytes"] is None or each["peak_bytes"] > 4 * each["parameters"]
    # Attention remembers a key and a value of each of 16 tokens; AFT-simple three sums of 8 channels.
    assert attention["state_bytes"] == 2 * 16 * 8 * 4
    assert simple["state_bytes"] == 3 * 8 * 8
    report = (out / "report.md").read_text()
    for name in ("index.html", "curves-over-tokens.svg", "curves-over-seconds.svg", "measurements.json"):
        assert (out / name).stat().st_size and (f"({name})" in report) == name.endswith(".svg")
    assert (out / "aft-simple/seed-1/checkpoints").is_dir()
    # The same command again trains and measures nothing, and gives the same report.
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main([*command, *flags, "--max-tokens=768", f"--out={out}"]) == 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_killed_and_run_again_gives_the_same_table(flags, tmp_path, unmeasured):
    command = ["compare", "aft-simple", "multi-head-attention", "--experiment=demo", "--seeds=2"]
    command += [*flags, "--max-tokens=2560", "--save-every=3"]
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-m", "postil.cli", *command, f"--out={killed}"], stdout=subprocess.DEVNULL
    )
    metrics, deadline = killed / "multi-head-attention/seed-2" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 8):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, 9)
    process.wait()
    assert not (killed / "results.json").exists()
    assert b'"final"' not in metrics.read_bytes(), "killed too late to tell"
    whole = tmp_path / "whole"
    assert main([*command, f"--out={killed}"]) == 0
    assert main([*command, f"--out={whole}"]) == 0
    assert (killed / "report.md").read_text() == (whole / "report.md").read_text()
    one, two = (json.loads((folder / "results.json").read_text()) for folder in (killed, whole))
    for a, b in zip(one["contenders"], two["contenders"], strict=True):
        assert [run["bits"] for run in a["runs"]] == [run["bits"] for run in b["runs"]]
        assert a["sample"] == b["sample"]
        one_curve, other_curve = (
            [[point[0], point[2]] for run in each["runs"] for point in run["curve"]] for each in (a, b)
        )
        assert one_curve == other_curve and len(one_curve) == 10


def test_a_budget_of_time_is_spent_once(text, tmp_path, unmeasured):
    contenders = plan({"aft-simple": settings(text, "aft-simple", max_tokens=None, max_time=0.3)})
    first = compare(contenders, [1], tmp_path / "out", console=QUIET)
    assert compare(contenders, [1], tmp_path / "out", console=QUIET) == first


def test_a_plan_of_an_older_version_lacks_what_came_later(text, tmp_path, unmeasured):
    contenders, out = plan({"a": settings(text, "aft-simple")}), tmp_path / "out"
    first = compare(contenders, [1], out, console=QUIET)
    path = out / "a" / "seed-1.json"
    written = json.loads(path.read_text())
    del written["data"]["statements"], written["compile"]
    path.write_text(json.dumps(written))
    assert compare(contenders, [1], out, console=QUIET) == first


def test_another_plan_in_the_same_folder_is_refused(text, tmp_path, unmeasured):
    out = tmp_path / "out"
    compare(plan({"a": settings(text, "aft-simple")}), [1], out, console=QUIET)
    other = plan({"a": settings(text, "aft-simple", model={"dropout": 0.5})})
    with pytest.raises(ValueError, match=r"other settings .*dropout"):
        compare(other, [1], out, console=QUIET)
    # One contender and one seed more are no other plan for those that are there.
    more = plan({"a": settings(text, "aft-simple"), "b": settings(text, "aft-conv")})
    assert len(compare(more, [1, 2], out, console=QUIET)["contenders"]) == 2


def test_equal_parameters(text):
    given = {name: settings(text, name) for name in ("multi-head-attention", "aft-simple", "aft-conv")}
    first, *others = plan(given, equal_parameters=True)
    model = build_language_model("multi-head-attention", first.settings.model, 20)
    per_unit = sum(p.numel() for p in model.backbone.layers[0].feed_forward.parameters()) // 32
    for each in others:
        assert abs(each.parameters - first.parameters) <= per_unit
    free = plan(given)
    assert free[2].parameters != free[0].parameters
    with pytest.raises(ValueError, match="even with d_ff=1"):
        large = settings(text, "feedback", model={"options": {"positions": 4096}})
        plan({"a": settings(text, "aft-simple"), "f": large}, equal_parameters=True)


def test_distances_beyond_a_window_do_not_count(text):
    (small,) = plan({"f": settings(text, "feedback")})
    # Shared keys and values: a vector of 8 and a bias for each of 2 heads, for each distance.
    (large,) = plan({"f": settings(text, "feedback", model={"options": {"positions": 17}})})
    assert large.parameters - small.parameters == 8 + 2


def test_settings_of_names():
    assert own_settings("transformer").model.d_model == 256
    assert own_settings("multi-head-attention").optimizer.schedule == "cosine"
    assert own_settings("aft-local").model == EXPERIMENTS["aft-local"].model
    base = own_settings("aft-local", "transformer")
    assert base.mixer == "aft-local" and base.model.d_model == 256 and base.epochs is None
    assert base.model.options == {} == own_settings("feedback", "aft").model.options
    assert own_settings("aft-local", "aft").model.options == {"local_window_size": 32}


def test_the_experiments_of_the_papers_can_be_compared(text):
    names = ("transformer", "aft-local", "aft-simple", "aft-conv", "feedback")
    given = {name: replace(own_settings(name), text=str(text), max_tokens=2_000_000) for name in names}
    contenders = plan(given)
    assert [each.settings.mixer for each in contenders] == ["multi-head-attention", *names[1:]]
    assert {each.settings.tokens_per_update for each in contenders} == {8192}
    assert all(each.parameters > 100_000 for each in contenders)


def test_impossible_comparisons(flags, text, tmp_path, capsys):
    def refused(*argv):
        assert main(["compare", *argv]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "'nope' is no mixer or experiment" in refused("nope", *flags, "--max-tokens=64")
    assert "needs a budget" in refused("aft-simple", *flags)
    assert "--seeds: '1;2'" in refused("aft-simple", *flags, "--max-tokens=64", "--seeds=1;2")
    assert "given twice" in refused("aft-simple", "aft-simple", *flags, "--max-tokens=64")
    assert "seeds=[1, 1]" in refused("aft-simple", *flags, "--max-tokens=64", "--seeds=1,1")
    assert "not the same budget" in refused("transformer", "demo", f"--text={text}", "--updates=3")
    assert not (tmp_path / "runs").exists()


# ## The report, from data alone
def document(**changes) -> dict:
    rate = {"median": 12345.0, "quartiles": [12000.0, 13000.0]}
    model = {"d_model": 8, "n_layers": 1, "heads": 2, "d_ff": None, "positions": "none", "dropout": 0.0}
    each = {
        "name": "a",
        "mixer": "aft-simple",
        "model": model | {"seq_len": 16, "options": {}},
        "optimizer": {"batch_size": 4, "schedule": "noam", "lr": 1.0, "warmup": 5},
        "parameters": 1234,
        "bits": {"mean": 2.0, "deviation": None},
        "training_tokens_per_second": rate,
        "sampling_tokens_per_second": rate,
        "state_bytes": 512,
        "peak_bytes": None,
        "runs": [{"seed": 1, "tokens": 64, "curve": [[64, 0.5, 3.0], [128, 1.0, 2.0]]}],
        "sample": "then <script>alert(1)</script> & ```",
        **changes,
    }
    return {
        "text": "t",
        "unit": "bits per character",
        "unigram_bits": 4.0,
        "budget": {"max_tokens": 64},
        "seeds": [1],
        "prompt": "the ",
        "machine": {"device": "x", "threads": 1, "system": "y", "versions": {"torch": "z"}},
        "contenders": [each],
    }


def test_no_spread_is_claimed_of_one_seed():
    assert "| 2.000 |" in as_markdown(document()) and "unknown" in as_markdown(document())
    assert "2.000 ± 0.100" in as_markdown(document(bits={"mean": 2.0, "deviation": 0.1}))


def test_the_page_asks_nobody_and_obeys_no_sample():
    page = as_page(document())
    assert "<script>alert" not in page and "&lt;script&gt;" in page
    assert "default-src 'none'" in page
    assert "http://" not in page and "https://" not in page and "src=" not in page.replace("-src", "")
    assert page.count("<polyline") >= 2
    assert "</script" not in data_block("d", "</script>").removesuffix("</script>")


def test_a_run_too_short_for_a_curve():
    short = document(runs=[{"seed": 1, "tokens": 64, "curve": []}])
    assert "<svg" in as_page(short)
    assert all(text.startswith("<svg") for text in curve_files(short).values())


def test_numbers_in_the_terminal_are_not_broken():
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(as_table(document()))
    assert "12,345" in console.export_text()


def test_settings_go_through_json(text):
    own = settings(text, "aft-local")
    assert settings_from_dict(json.loads(json.dumps(own.to_dict()))) == own
    assert torch.get_num_threads() >= 1
