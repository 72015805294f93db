r"""Write docs/reliability.md: what users may rely on, and the tests that hold it.

    python docs/make_reliability.py            write the page anew
    python docs/make_reliability.py --fuzz     first take over the counts of the last fuzz run
    python docs/make_reliability.py --figures  first take over what tests counted when they last ran

The promises stand in reliability/promises.csv, the cases of others' bug reports in reliability/cases.csv, the
counts of the fuzz run in reliability/fuzz.json, what tests counted in reliability/figures.json. Which test
holds which case is read from the tests. No count of ours is typed: `{test_name[key]}` in a promise stands
for what that test has kept by its fixture `figure`, the largest of all its variants.
"""

from __future__ import annotations

import ast
import csv
import json
import os
import platform
import sys
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGE = HERE / "reliability.md"
HEAD = """# What users may rely on

Made by `python docs/make_reliability.py`; do not edit. Each line names the tests that hold it,
so that it can be checked: `make test` runs the quick ones, `make faults` and `make test-full` all.
"""
KINDS = {
    "anchor": "## Promises, beside what others promise\n\n| promise | elsewhere | here | tests |\n"
    "|---|---|---|---|",
    "security": "## Security\n\nThe threats are described in [security.md](security.md).\n\n"
    "| promise | elsewhere | here | tests |\n|---|---|---|---|",
    "fault": "## Faults\n\n| fault | elsewhere, or asked for | here | tests |\n|---|---|---|---|",
}


def collect() -> tuple[dict[str, list[str]], set[str]]:
    """Read the tests: which hold each case, and all there are."""
    cases, tests = defaultdict(list), set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "node_modules" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            name = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
            tests.add(name)
            for call in (c for d in node.decorator_list for c in ast.walk(d) if isinstance(c, ast.Call)):
                if ast.unparse(call.func) == "pytest.mark.case":
                    for argument in call.args:
                        cases[ast.literal_eval(argument)].append(name)
    return cases, tests


def rows(name: str) -> list[dict[str, str]]:
    """Read a table of ours."""
    with (HERE / "reliability" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def link(test: str) -> str:
    """Write a test as a link to its file."""
    path, _, name = test.partition("::")
    return f"[{name}](../{path})"


def page() -> str:
    """Write the page.

    Raises:
        ValueError: a promise names a test that is not there, or a case is held by none.
    """
    cases, tests = collect()
    parts, missing = [HEAD], []
    promises, counted = rows("promises.csv"), largest(figures())
    for kind, head in KINDS.items():
        lines = [head]
        for row in (r for r in promises if r["kind"] == kind):
            named = [t for w in row["tests"].split() for t in (cases[w[1:]] if w[0] == "@" else [w])]
            missing += [test for test in named if test not in tests]
            title = f"{row['id']}: {row['promise']}" if kind == "fault" else row["promise"]
            shown = "<br>".join(map(link, dict.fromkeys(named)))
            lines.append(f"| {title} | {row['anchor']} | {filled(row['ours'], counted)} | {shown} |")
        parts.append("\n".join(lines) + "\n")
    known = rows("cases.csv")
    missing += [row["id"] for row in known if not cases[row["id"]]]
    missing += sorted(
        set(cases) - {row["id"] for row in known} - {key for key, held in cases.items() if not held}
    )
    if missing:
        raise ValueError(f"no such test or case, or a case without a test: {', '.join(missing)}")
    parts.append(
        f"## Cases\n\n{len(known)} failures that users of other projects reported, each a test here.\n\n"
        "| case | what must hold | tests |\n|---|---|---|\n"
        + "\n".join(
            f"| {r['id']} | {r['essence']} | {'<br>'.join(map(link, cases[r['id']]))} |" for r in known
        )
        + "\n"
    )
    return "\n".join([*parts, measured(), fuzz()])


# ## Figures
Figures = dict[str, dict[str, Any]]


def figures() -> dict[str, Any]:
    """Read what tests have counted, and where."""
    file = HERE / "reliability" / "figures.json"
    return json.loads(file.read_text()) if file.exists() else {"machine": {}, "tests": {}}


def largest(read: dict[str, Any]) -> Figures:
    """Put the variants of each test together."""
    found: Figures = {}
    for node, counts in read["tests"].items():
        name = node.partition("::")[2].partition("[")[0]
        both = found.setdefault(name, {})
        both |= {key: max(value, both.get(key, value)) for key, value in counts.items()}
    return found


def filled(text: str, counted: Figures) -> str:
    """Put figures into a promise; one whose test has not run says so."""
    try:
        return text.format_map(counted)
    except KeyError:
        return "not measured yet"


def measured() -> str:
    """Write the table of everything that was counted."""
    read = figures()
    machine = ", ".join(f"{key} {value}" for key, value in read["machine"].items())
    lines = [
        f"## Measured\n\nWhat the tests counted in the run that is recorded here ({machine}).\nA saver that "
        "is known to be bad stands beside ours, so that it is known that the tests bite.\n",
        "| test | figures |\n|---|---|",
    ]
    for node, counts in sorted(read["tests"].items()):
        shown = ", ".join(
            f"{key.replace('_', ' ')} {value:.3g}"
            if isinstance(value, float)
            else f"{key.replace('_', ' ')} {value}"
            for key, value in counts.items()
        )
        lines.append(f"| {node.partition('::')[2]} | {shown} |")
    return "\n".join(lines) + "\n"


def keep_figures() -> None:
    """Take over what tests have counted since the last time; what did not run keeps its old figure."""
    read = figures()
    for path in sorted((ROOT / ".pytest_cache" / "figures").glob("*.json")):
        counts = json.loads(path.read_text())
        read["tests"][counts.pop("test")] = counts
    read["machine"] = {
        "torch": version("torch"),
        "Python": platform.python_version(),
        "cores": os.cpu_count(),
        "on": time.strftime("%Y-%m-%d"),
    }
    text = json.dumps(read, indent=1, sort_keys=True) + "\n"
    (HERE / "reliability" / "figures.json").write_text(text)


# ## Fuzzing
def fuzz() -> str:
    """Write the table of the last recorded fuzz run."""
    file = HERE / "reliability" / "fuzz.json"
    counts = json.loads(file.read_text()) if file.exists() else {}
    lines = [
        "## Fuzzing\n\nRandom input (hypothesis) to every reader of what strangers write: each gives back "
        "what it should,\nor one clear line. "
        "`POSTIL_FUZZ=100 python -m pytest tests/fuzz` tries a hundred times as many.\n",
        "| test | inputs | how they ended | faults left |\n|---|---|---|---|",
    ]
    for name, outcomes in sorted(counts["tests"].items()) if counts else ():
        ended = ", ".join(f"{count} {how}" for how, count in sorted(outcomes.items()))
        lines.append(f"| {name} | {sum(outcomes.values())} | {ended} | 0 |")
    guided = counts.get("guided", {})
    if guided:
        lines.append(
            "\nThe same readers under a fuzzer that changes its input until it reaches new code (atheris, by "
            "`tests/fuzz/guided.py`):\n\n| reader | seconds of processor time | inputs | places of code "
            "reached | faults left |\n|---|---|---|---|---|"
        )
        lines += [
            f"| {name} | {run['seconds']} | {run['inputs']:,} | {run['reached']:,} | {run['faults']} |"
            for name, run in sorted(guided.items())
        ]
    found = counts.get("found", [])
    lines.append(f"\nFaults found while this suite was written, all mended: {len(found)}.\n")
    lines += [f"- {each}" for each in found]
    return "\n".join(lines) + "\n"


def take_over() -> None:
    """Record the counts of the last fuzz run."""
    file = HERE / "reliability" / "fuzz.json"
    before = json.loads(file.read_text()) if file.exists() else {"found": []}
    folder = ROOT / ".pytest_cache" / "fuzz"
    before["tests"] = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("test_*.json"))}
    file.write_text(json.dumps(before, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if "--figures" in sys.argv[1:]:
        keep_figures()
    if "--fuzz" in sys.argv[1:]:
        take_over()
    PAGE.write_text(page(), encoding="utf-8")
