r"""The report of a comparison, from its data alone, for a terminal, a text, a page and a figure.

Every form shows the same rows. How they are written is decided once, in `rows`.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table

from postil.leaflet import leaflet, line_chart

__all__ = ["as_markdown", "as_page", "as_table", "draw", "rows"]

COLUMNS = (
    "model",
    "parameters",
    "{unit}",
    "training tokens/s",
    "sampling tokens/s",
    "peak memory, MB",
    "state, kB",
)


def rows(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    r"""Write the table: its heads, and a row of text for each contender."""
    heads = [column.format(unit=document["unit"]) for column in COLUMNS]
    return heads, [_row(each) for each in document["contenders"]]


def _row(each: dict[str, Any]) -> list[str]:
    return [
        each["name"],
        f"{each['parameters']:,}",
        _with_spread(each["bits"]),
        _rate(each["training_tokens_per_second"]),
        _rate(each["sampling_tokens_per_second"]),
        "unknown" if each["peak_bytes"] is None else f"{each['peak_bytes'] / 1e6:,.0f}",
        f"{each['state_bytes'] / 1e3:,.1f}",
    ]


# One seed has no spread, and a report that printed 0 for it would claim to know.
def _with_spread(bits: dict[str, Any]) -> str:
    mean = f"{bits['mean']:.3f}"
    return mean if bits["deviation"] is None else f"{mean} ± {bits['deviation']:.3f}"


def _rate(rate: dict[str, Any]) -> str:
    return f"{rate['median']:,.0f}"


def notes(document: dict[str, Any]) -> list[str]:
    r"""Say what the columns mean and under which conditions they were taken."""
    machine, budget = document["machine"], document["budget"]
    shapes = [_shape(each) for each in document["contenders"]]
    tokens = sorted({run["tokens"] for each in document["contenders"] for run in each["runs"]})
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    spread = " (mean and standard deviation over seeds)" if len(document["seeds"]) > 1 else ""
    return [
        f"Text: {document['text']}, the whole validation part after training{spread}; frequencies of single "
        f"tokens alone reach {document['unigram_bits']:.3f} {document['unit']}.",
        f"Budget: {', '.join(f'{name} {value}' for name, value in budget.items())}; tokens read: "
        f"{' to '.join(f'{n:,}' for n in dict.fromkeys((tokens[0], tokens[-1])))}; seeds: "
        f"{', '.join(map(str, document['seeds']))}.",
        "Speeds are medians of rounds in which the contenders took turns, one update each, or one text "
        "written token by token; peak memory is what two updates add to a fresh process; the state is what "
        "decoding remembers of one text as long as the window.",
        f"Machine: {machine['device']}, {machine['threads']} threads, {machine['system']}; {versions}.",
        *shapes,
    ]


def _shape(each: dict[str, Any]) -> str:
    m = each["model"]
    width = 4 * m["d_model"] if m["d_ff"] is None else m["d_ff"]
    o = each["optimizer"]
    options = "".join(f", {name} {value}" for name, value in m["options"].items())
    return (
        f"{each['name']}: {each['mixer']}, width {m['d_model']}, {m['n_layers']} layers, {m['heads']} heads, "
        f"d_ff {width}, {m['positions']} positions, dropout {m['dropout']}{options}, windows of "
        f"{m['seq_len']} tokens, {o['batch_size']} in an update, {o['schedule']} schedule with lr "
        f"{o['lr']:g} and {o['warmup']} updates of warm-up"
    )


def as_table(document: dict[str, Any]) -> Table:
    r"""Make the table for a terminal."""
    heads, lines = rows(document)
    table = Table(box=None, padding=(0, 1, 0, 0))
    # In a narrow terminal a column's head may be broken between words, its numbers and names never.
    for number, head in enumerate(heads):
        width = max(map(len, [*head.split(), *(line[number] for line in lines)]))
        table.add_column(head, justify="right" if number else "left", min_width=width)
    for line in lines:
        table.add_row(*line)
    return table


def as_markdown(document: dict[str, Any]) -> str:
    r"""Write the report as Markdown: the table, its conditions, and the samples."""
    heads, lines = rows(document)
    table = [
        "| " + " | ".join(heads) + " |",
        "| --- |" + " ---: |" * (len(heads) - 1),
        *("| " + " | ".join(line) + " |" for line in lines),
    ]
    samples = []
    for each in document["contenders"]:
        text = document["prompt"] + each["sample"]
        # Four spaces make a block that no text can close, unlike a fence of backquotes.
        samples += [f"### {each['name']}", "", *("    " + line for line in text.splitlines()), ""]
    listed = "\n".join(f"- {note}" for note in notes(document))
    picture = "![Learning curves](curves.svg)"
    return "\n".join(["# Comparison", "", *table, "", listed, "", picture, "", "## Samples", "", *samples])


# ## Curves
def curves(document: dict[str, Any], axis: int) -> dict[str, list[list[tuple[float, float]]]]:
    r"""Give the learning curves, one line a seed, over tokens (`axis=0`) or seconds (`axis=1`)."""
    return {
        each["name"]: [[(point[axis], point[2]) for point in run["curve"]] for run in each["runs"]]
        for each in document["contenders"]
    }


AXES = ("tokens", "seconds")


def as_page(document: dict[str, Any]) -> str:
    r"""Write the report as one HTML file that needs nothing else."""
    heads, lines = rows(document)
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(line[0])}</th>'
        + "".join(f"<td>{escape(text)}</td>" for text in line[1:])
        + "</tr>"
        for line in lines
    )
    charts = "".join(
        line_chart(
            curves(document, axis),
            name,
            document["unit"],
            f"A part of the validation text during training, over {name}.",
        )
        for axis, name in enumerate(AXES)
    )
    samples = "".join(
        f'<div class="card"><h3>{escape(each["name"])}</h3><pre><strong>{escape(document["prompt"])}</strong>'
        f"{escape(each['sample'])}</pre></div>"
        for each in document["contenders"]
    )
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes(document))
    return leaflet(
        "Comparison: " + ", ".join(each["name"] for each in document["contenders"]),
        f'<div class="wide" tabindex="0" role="region" aria-label="Results"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<ul class="muted">{listed}</ul><h2>Learning curves</h2><div class="side">{charts}</div>'
        f'<h2>Samples</h2><div class="side">{samples}</div>',
    )


def draw(document: dict[str, Any], folder: Path) -> list[Path]:
    r"""Draw the learning curves over tokens and over seconds as `curves.svg` and `curves.png`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to get it.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the curves need matplotlib: pip install 'postil[plot]'") from error
    figure = Figure(figsize=(11, 4), layout="constrained")
    for axis, axes in enumerate(figure.subplots(1, 2, sharey=True)):
        for number, (name, lines) in enumerate(curves(document, axis).items()):
            for again, line in enumerate(lines):
                style = {"color": f"C{number}", "linewidth": 1.2, "label": None if again else name}
                axes.plot([x for x, _ in line], [y for _, y in line], **style)
        axes.set(xlabel=AXES[axis], ylabel=document["unit"] if axis == 0 else None)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.axes[0].legend(frameon=False)
    paths = [folder / "curves.svg", folder / "curves.png"]
    # The ids in an SVG are drawn at random unless salted: the same data gives the same file.
    with rc_context({"svg.hashsalt": "postil"}):
        figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=150)
    return paths
