r"""Export: the sampling steps of a model as graphs that run without Postil, and without Python.

Writing text takes two graphs. `prefill` reads a prompt and gives its logits and the state; `step` reads one
token, its position and the state, and gives logits and the new state. The tensors of the state are inputs
and outputs by name, of any length. `export.json` beside them says the rest, the vocabulary included.

Tracing replaces a number by a constant wherever the code made a decision with it. So no graph is written
before it has computed what the model computes, at several lengths and batch sizes. Where no `prefill` of any
length can be had, `export.json` says so: a prompt is then read by `prefill` of one token, then by `step`.

| model | `step` | `prefill` |
| --- | --- | --- |
| attention | any batch and text | any batch and text, at once |
| AFT, each member | any batch and text | any batch and text, by a loop of steps in the graph |
| Feedback Transformer, both forms | any batch and text | one token |
| any of them with a window on its memory | refused | refused |

A window makes a state forget from some length on, which a graph made of one length would not know.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.func import functional_call

from postil.integrations.states import Layout, layout_of, leaves
from postil.language_model import LanguageModel
from postil.mixer import State
from postil.sampling import evaluating
from postil.training.saved import SavedRun

__all__ = ["FORMATS", "ExportError", "export_model"]

FORMATS = ("onnx", "torch")

Run = Callable[..., list[Tensor]]


class ExportError(ValueError):
    r"""A model that cannot be exported in this form, and why."""


# ## The two graphs
Writer = Callable[[str], None]
Converter = Callable[["_Graph"], Writer]


class _Prefill(nn.Module):
    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> list[Tensor]:
        logits, state = self.model.prefill(ids)
        return [logits, *_tensors(state)]


# A text of one token needs no pass over many: its step is made of simpler operations, which more graphs have.
class _First(_Prefill):
    def forward(self, ids: Tensor) -> list[Tensor]:
        logits, state = self.model.step(ids[:, 0])
        return [logits[:, None], *_tensors(state)]


# The position is a tensor, so that it stays a number nobody knows while the graph is traced; all that is
# promised of it is its range.
class _Step(nn.Module):
    def __init__(self, model: LanguageModel, layout: Layout):
        super().__init__()
        self.at = _At(model, layout)

    def forward(self, ids: Tensor, position: Tensor, *state: Tensor) -> list[Tensor]:
        return self.at(_number(position, self.at.model), ids, *state)


class _At(nn.Module):
    def __init__(self, model: LanguageModel, layout: Layout):
        super().__init__()
        self.model = model
        self.layout = layout

    def forward(self, position: Any, ids: Tensor, *state: Tensor) -> list[Tensor]:
        logits, after = self.model.step(ids, self.layout.assemble(state, position))
        return [logits, *_tensors(after)]


def _number(position: Tensor, model: LanguageModel) -> Any:
    number = position.item()
    torch._check(number >= 1)
    if model.max_len is not None:
        torch._check(number < model.max_len)
    return number


# Where the pass over many positions makes decisions by numbers, the step can still be traced, and a loop of
# steps inside the graph reads a prompt of any length. Its rounds must be alike: what grows in the state has
# its final length from the start, and a round sees the rows written so far. The first token is read before
# the loop, since it makes the state; round 0 changes nothing.
class _Scanned(nn.Module):
    def __init__(self, model: LanguageModel, layout: Layout):
        super().__init__()
        self.at = _At(model, layout)
        self.growing = layout.growing

    def forward(self, ids: Tensor) -> list[Tensor]:
        first, state = self.at.model.step(ids[:, 0])
        rounds = torch.arange(ids.shape[1])
        begin = [
            x.clone() if axis is None else torch.where(_along(rounds == 0, x, axis), x, 0.0)
            for x, axis in zip(_tensors(state), self.growing, strict=True)
        ]
        # A loop sees only what it is handed, parameters too.
        stored = {**dict(self.at.named_parameters()), **dict(self.at.named_buffers())}

        def turn(*given: Tensor) -> list[Tensor]:
            before, rest = given[: len(begin)], given[len(begin) + 2 :]
            token, number = given[len(begin) : len(begin) + 2]
            return self._turn(dict(zip(stored, rest, strict=True)), token, number, before)

        inputs = [ids.t().contiguous(), rounds]
        *after, logits = torch.ops.higher_order.scan(turn, begin, inputs, tuple(stored.values()))
        return [torch.where((rounds == 0)[:, None, None], first, logits).transpose(0, 1), *after]

    def _turn(
        self, stored: dict[str, Tensor], token: Tensor, number: Tensor, state: tuple[Tensor, ...]
    ) -> list[Tensor]:
        place = _number(number.clamp(min=1), self.at.model)
        for x, axis in zip(state, self.growing, strict=True):
            torch._check(axis is None or place <= x.shape[axis])
        pairs = zip(state, self.growing, strict=True)
        seen = [x if axis is None else x.narrow(axis, 0, place) for x, axis in pairs]
        logits, *after = functional_call(self.at, stored, (place, token, *seen))
        kept = []
        for old, new, axis in zip(state, after, self.growing, strict=True):
            here = number > 0
            if axis is not None:
                new = new.narrow(axis, place, 1)
                here = here & _along(torch.arange(old.shape[axis]) == number, old, axis)
            kept.append(torch.where(here, new, old))
        return [*kept, logits]


def _along(flags: Tensor, x: Tensor, axis: int) -> Tensor:
    return flags.view([-1] + [1] * (x.dim() - axis - 1))


def _tensors(state: State) -> list[Tensor]:
    return [leaf for leaf in leaves(state) if isinstance(leaf, Tensor) and leaf.dim()]


@dataclass(frozen=True)
class _Graph:
    name: str
    program: ExportedProgram
    inputs: dict[str, tuple[str | int, ...]]
    outputs: dict[str, tuple[str | int, ...]]
    cases: list[tuple[tuple[Tensor, ...], list[Tensor]]]
    """Inputs and what the model makes of them: several lengths, several batch sizes where any will do."""

    def check(self, run: Run) -> None:
        r"""Compare with the model.

        Raises:
            ExportError: naming the first shape at which they differ.
        """
        for inputs, expected in self.cases:
            shapes = [list(x.shape) for x in inputs]
            try:
                found = run(*inputs)
            except Exception as error:
                raise ExportError(f"{self.name} fails for inputs {shapes}: {_one_line(error)}") from error
            for one, other in zip(found, expected, strict=True):
                if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
                    raise ExportError(f"{self.name} computes something else for inputs {shapes}")


# Any batch and any length is wanted; a loop, one row, and then one token, is what is taken if need be.
def _prefill_graph(model: LanguageModel, layout: Layout, convert: Converter) -> tuple[_Graph, Writer]:
    longest = model.max_len or 128

    def attempt(module: nn.Module, batch: bool, length: bool) -> _Graph:
        rows, tokens = (2 if batch else 1), (6 if length else 1)
        dims = {axis: Dim.DYNAMIC for axis, free in enumerate((batch, length)) if free}
        program = _trace(module, (_some_ids(model, rows, tokens),), (dims or None,))
        lengths = [t for t in (1, 2, 5, 6, 12, longest) if t <= longest] if length else [1]
        inputs = [_some_ids(model, b, t) for b in ((1, 2, 3) if batch else (1,)) for t in lengths]
        cases = [((ids,), _Prefill(model)(ids)) for ids in inputs]
        shape = ("B" if batch else 1, "T" if length else 1)
        logits = {"logits": (*shape, model.generator.projection.out_features)}
        state = _named("next", layout, {"B": shape[0], "S": shape[1]})
        return _Graph("prefill", program, {"ids": shape}, {**logits, **state}, cases)

    whole, scanned, one = _Prefill(model), _Scanned(model, layout), _First(model)
    choices = [
        (whole, True, True),
        (scanned, True, True),
        (whole, False, True),
        (one, True, False),
        (one, False, False),
    ]
    return _first(attempt, choices, convert)


def _step_graph(model: LanguageModel, layout: Layout, convert: Converter) -> tuple[_Graph, Writer]:
    longest = model.max_len or 128

    def example(rows: int, tokens: int) -> tuple[Tensor, ...]:
        ids = _some_ids(model, rows, tokens + 1)
        state = model.prefill(ids[:, :tokens])[1]
        return ids[:, tokens], torch.tensor(tokens), *_live(state, layout)

    # A step of the model itself may leave room behind the last row of its state; reading the text anew does
    # not.
    def expected(rows: int, tokens: int) -> list[Tensor]:
        logits, state = model.prefill(_some_ids(model, rows, tokens + 1))
        return [logits[:, -1], *_live(state, layout)]

    def attempt(batch: bool) -> _Graph:
        rows = 2 if batch else 1
        free = {"S"} | ({"B"} if batch else set())
        dims = [
            {i: Dim.DYNAMIC for i, axis in enumerate(axes) if axis in free} or None for axes in layout.axes
        ]
        ids = {0: Dim.DYNAMIC} if batch else None
        program = _trace(_Step(model, layout), example(rows, 7), (ids, None, tuple(dims)))
        lengths = [t for t in (1, 5, 7, 12, longest - 1) if 0 < t < longest]
        cases = [(example(b, t), expected(b, t)) for b in ((1, 2, 3) if batch else (1,)) for t in lengths]
        b = "B" if batch else 1
        state = _named("state", layout, {"B": b})
        after = _named("next", layout, {"B": b, "S": "S + 1"})
        logits = {"logits": (b, model.generator.projection.out_features)}
        return _Graph("step", program, {"ids": (b,), "position": (), **state}, {**logits, **after}, cases)

    return _first(attempt, [(True,), (False,)], convert)


# What `next.` gives is what `state.` takes; a graph may not use one name twice.
def _named(prefix: str, layout: Layout, sizes: dict[str, str | int]) -> dict[str, tuple[str | int, ...]]:
    shapes = (tuple(sizes.get(str(size), size) for size in shape) for shape in layout.axes)
    return {f"{prefix}.{name}": shape for name, shape in zip(layout.names, shapes, strict=True)}


def _live(state: State, layout: Layout) -> list[Tensor]:
    tensors = _tensors(state)
    if len(tensors) != len(layout.names):
        raise ExportError("its state has not the same tensors at every length")
    return tensors


def _some_ids(model: LanguageModel, rows: int, tokens: int) -> Tensor:
    vocabulary = model.generator.projection.out_features
    return (torch.arange(rows * tokens) * 7 % vocabulary).reshape(rows, tokens)


def _first(
    attempt: Callable[..., _Graph], choices: Sequence[tuple[Any, ...]], convert: Converter
) -> tuple[_Graph, Writer]:
    for choice in choices:
        try:
            graph = attempt(*choice)
            program: Any = graph.program.module()
            graph.check(lambda *inputs: program(*inputs))  # noqa: B023
            return graph, convert(graph)
        except ModuleNotFoundError:
            raise
        except Exception as error:
            if choice is choices[-1]:
                raise ExportError(_cause(error)) from error
    raise AssertionError("there is always a last choice")


def _trace(module: nn.Module, example: tuple[Tensor, ...], dims: tuple[Any, ...]) -> ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(module, example, dynamic_shapes=dims, strict=False)


# ## Writing
def export_model(run: SavedRun, out: Path, to: str) -> dict[str, Any]:
    r"""Write `prefill`, `step` and `export.json` into a new folder; return what `export.json` says.

    `to` is `onnx` (checked by onnxruntime) or `torch` (`.pt2` files for `torch.export.load`).

    Raises:
        ExportError: the model cannot be exported; nothing is written.
        ValueError: `to` is neither, or the folder has something in it.
        ModuleNotFoundError: onnx, onnxscript or onnxruntime is missing.
    """
    if to not in FORMATS:
        raise ValueError(f"--to {to}: expected one of {', '.join(FORMATS)}")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out}: is not empty; give another folder")
    # A loop whose parameters want gradients is not taken apart for ONNX.
    model = copy.deepcopy(run.model).requires_grad_(False)
    with evaluating(model):
        try:
            layout = layout_of(model)
            convert = _onnx if to == "onnx" else _pt2
            graphs = [make(model, layout, convert) for make in (_step_graph, _prefill_graph)]
        except ValueError as error:
            raise ExportError(f"{run.settings.mixer} cannot be exported to {to}: {error}") from error
    out.mkdir(parents=True, exist_ok=True)
    described = {}
    for graph, write in graphs:
        file = f"{graph.name}.{'onnx' if to == 'onnx' else 'pt2'}"
        write(str(out / file))
        described[graph.name] = {"file": file, "inputs": graph.inputs, "outputs": graph.outputs}
    description = {
        "format": 1,
        "mixer": run.settings.mixer,
        "settings": asdict(run.settings.model),
        "max_len": run.model.max_len,
        **described,
        "tokenizer": run.tokenizer.to_dict(),
    }
    (out / "export.json").write_text(json.dumps(description, indent=1), encoding="utf-8")
    return description


def _pt2(graph: _Graph) -> Writer:
    return lambda path: torch.export.save(graph.program, path)


def _onnx(graph: _Graph) -> Writer:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is needed: pip install onnx onnxscript onnxruntime, or 'postil[onnx]'"
        ) from error
    inputs, outputs = list(graph.inputs), list(graph.outputs)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                graph.program, input_names=inputs, output_names=outputs, dynamo=True, verbose=False
            )
        assert program is not None
        data = program.model_proto.SerializeToString()
        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ExportError(f"{graph.name}: {_one_line(error)}") from error

    def run(*tensors: Tensor) -> list[Tensor]:
        arrays = dict(zip(inputs, (x.numpy() for x in tensors), strict=True))
        return [torch.from_numpy(array) for array in session.run(outputs, arrays)]

    graph.check(run)
    return lambda path: program.save(path, external_data=False)


def _cause(error: BaseException) -> str:
    if "specialized it to be a constant" in str(error):
        return "its code fixes a length while it is traced; the graph would hold for that length alone"
    return _one_line(error)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
