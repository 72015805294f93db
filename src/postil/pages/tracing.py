r"""Tracing: what a page's own example makes, line by line.

A page may hold one runnable example in its notes, with the sizes it uses:

    ```python example T=6 B=2 D=8
    mixer = MultiHeadAttention(heads=2, d_model=8)
    y = mixer(query=x, key=x, value=x)
    plots = {"Attention weights of the first head": weights[:, :, 0, 0]}
    ```

Only when a build is asked to `run` is it run: in a process of its own, with limits on time and memory. While
it runs, every line of the page that makes a tensor gets that tensor's shape, sizes shown by name, and
whatever `plots` holds at the end is drawn below the example.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from postil.pages.project import Project
from postil.pages.reading import Fault, Page

__all__ = ["Trace", "example_of", "run_example"]

SECONDS = 120
MEMORY = 8 << 30


@dataclass
class Trace:
    r"""Shapes by line number, and plots by name: numbers in a list, in a list of lists, or by names."""

    shapes: dict[int, str] = field(default_factory=dict)
    plots: dict[str, Any] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


def example_of(page: Page) -> tuple[str, dict[str, int]] | None:
    r"""The code of a page's example and the names of its sizes, or None."""
    example = page.example()
    if example is None:
        return None
    return example[1], {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", example[0])}


def run_example(project: Project, page: Page) -> Trace:
    r"""Run a page's example in another process; an error there becomes a fault of the page."""
    example, source = example_of(page), page.source
    if example is None or source is None:
        return Trace()
    code, sizes = example
    package = _is_package(project)
    top = project.root.parent if package else project.root
    name = f"{project.root.name}.{page.module.name}".rstrip(".") if package else page.module.name
    task = {
        "paths": [str(top)],
        "module": name,
        "file": str(page.module.file),
        "code": code,
        "targets": _targets(source.tree),
        "memory": MEMORY,
        "seconds": SECONDS,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", _RUNNER],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=project.home,
            # With one thread, sums are made in the same order on a machine of any size.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Trace(faults=[Fault(source.path, 1, f"the example ran longer than {SECONDS} s")])
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Trace(faults=[Fault(source.path, 1, f"the example failed: {reason}")])
    found = json.loads(done.stdout.rpartition("\n\x1e")[2])
    shapes = {int(line): _named(shapes, sizes) for line, shapes in found["shapes"].items()}
    return Trace(shapes, found["plots"])


def _is_package(project: Project) -> bool:
    return any(module.path == "__init__.py" for module in project.modules)


def _named(shapes: list[list[int]], sizes: dict[str, int]) -> str:
    names: dict[int, str] = {}
    for name, size in sizes.items():
        names.setdefault(size, name)
    # An axis of length 1 is mostly the remainder of a sum, not a named size that happens to be 1.
    names.pop(1, None)
    return "  ".join(f"[{', '.join(names.get(n, str(n)) for n in shape)}]" for shape in shapes)


# A line makes what it assigns, or what it returns; the name is looked up when the next line begins.
def _targets(tree: ast.Module) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            targets = [node.target]
        names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        if names and isinstance(node, ast.stmt):
            found[node.lineno] = names
    return found


# The program of the child process, as text: it must not import the publisher, only the page's module.
_RUNNER = r"""
import importlib, json, sys

task = json.load(sys.stdin)
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (task["seconds"], task["seconds"]))
    resource.setrlimit(resource.RLIMIT_AS, (task["memory"], task["memory"]))
except (ImportError, ValueError, OSError):
    pass
sys.path[:0] = task["paths"]
targets = {int(line): names for line, names in task["targets"].items()}
shapes = {}

def shape_of(value):
    shape = getattr(value, "shape", None)
    try:
        return [int(n) for n in shape] if shape is not None and not callable(shape) else None
    except (TypeError, ValueError):
        return None

def watch(frame, event, argument):
    if frame.f_code.co_filename != task["file"]:
        return None
    before = [frame.f_lineno]
    def inside(frame, event, argument):
        line = before[0]
        if event in ("line", "return") and line in targets and line not in shapes:
            made = [shape_of(frame.f_locals[name]) for name in targets[line] if name in frame.f_locals]
            if made and all(made):
                shapes[line] = made
        before[0] = frame.f_lineno
        return inside
    return inside

module = importlib.import_module(task["module"])
names = dict(vars(module))
code = compile(task["code"], "<example>", "exec")
sys.settrace(watch)
try:
    exec(code, names)
finally:
    sys.settrace(None)

def numbers(value):
    value = value.detach() if hasattr(value, "detach") else value
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, dict):
        return {str(name): numbers(v) for name, v in value.items()}
    return [numbers(v) for v in value] if isinstance(value, (list, tuple)) else round(float(value), 5)

plots = {str(name): numbers(value) for name, value in dict(names.get("plots", {})).items()}
print("\n\x1e" + json.dumps({"shapes": shapes, "plots": plots}))
"""
