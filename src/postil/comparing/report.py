r"""The report of a comparison, from its data alone, for a terminal, a text, a page and a figure.

Every form shows the same rows. How they are written is decided once, in `rows`.
"""

from __future__ import annotations

from html import escape
from typing import Any

from rich.table import Table

from postil.comparing.chart import STYLE, Curve, chart, chart_file
from postil.leaflet import leaflet

__all__ = ["as_markdown", "as_page", "as_table", "curve_files", "curves", "rows"]

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


def notes(document: dict[str, Any]) -> tuple[list[str], list[str]]:
    r"""Say what the columns mean and under which conditions they were taken; and the settings of each."""
    machine = document["machine"]
    shapes = [_shape(each) for each in document["contenders"]]
    tokens = sorted({run["tokens"] for each in document["contenders"] for run in each["runs"]})
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    spread = " (mean and standard deviation over seeds)" if len(document["seeds"]) > 1 else ""
    measured = [
        f"Text: {document['text']}, the whole validation part after training{spread}; frequencies of single "
        f"tokens alone reach {document['unigram_bits']:.3f} {document['unit']}.",
        f"Budget: {_budget(document)}; tokens read: "
        f"{' to '.join(f'{n:,}' for n in dict.fromkeys((tokens[0], tokens[-1])))}; seeds: "
        f"{', '.join(map(str, document['seeds']))}.",
        "Speeds are medians of rounds in which the contenders took turns, one update each, or one text "
        "written token by token; peak memory is what two updates add to a fresh process; the state is what "
        "decoding remembers of one text as long as the window.",
        f"Machine: {machine['device']}, {_counted(machine['threads'], 'thread')}, {machine['system']}; "
        f"{versions}.",
    ]
    return measured, shapes


def _budget(document: dict[str, Any]) -> str:
    names = {"max_tokens": "token", "max_time": "second", "updates": "update", "epochs": "epoch"}
    return " or ".join(_counted(value, names[name]) for name, value in document["budget"].items())


def _counted(value: float, what: str) -> str:
    return f"{value:,} {what}{'' if value == 1 else 's'}"


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
    # Heads may be broken between words, numbers and names never. Where the terminal is too narrow, a table
    # that adapts itself to it leaves columns out, without a word; this one keeps its width.
    columns = [[head, *(line[number] for line in lines)] for number, head in enumerate(heads)]
    widths = [max(map(len, [*column[0].split(), *column[1:]])) for column in columns]
    table = Table(box=None, padding=(0, 1, 0, 0), width=sum(widths) + len(widths))
    for number, (head, width) in enumerate(zip(heads, widths, strict=True)):
        table.add_column(head, justify="right" if number else "left", width=width)
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
    measured, shapes = notes(document)
    listed = "\n".join(f"- {note}" for note in [*measured, *shapes])
    pictures = [f"![Learning curves over {name}]({file})" for name, file in zip(AXES, FILES, strict=True)]
    heading = "## Learning curves"
    head = ["# Comparison", "", *table, "", listed, "", heading, "", *pictures, "", "## Samples", ""]
    return "\n".join([*head, *samples])


# ## Curves
AXES = ("tokens", "seconds")
FILES = tuple(f"curves-over-{name}.svg" for name in AXES)


def curves(document: dict[str, Any], axis: int) -> dict[str, Curve]:
    r"""Give the learning curves, one line a seed, over tokens (`axis=0`) or seconds (`axis=1`)."""
    return {
        each["name"]: [[(point[axis], point[2]) for point in run["curve"]] for run in each["runs"]]
        for each in document["contenders"]
    }


def curve_files(document: dict[str, Any]) -> dict[str, str]:
    r"""Draw the learning curves over tokens and over seconds: an SVG for each name of a file."""
    return {
        file: chart_file(curves(document, axis), name, document["unit"])
        for axis, (name, file) in enumerate(zip(AXES, FILES, strict=True))
    }


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
        f'<figure><div class="wide" tabindex="0" role="region" aria-label="Curves over {name}">'
        f"{chart(curves(document, axis), name, document['unit'])}</div>"
        f"<figcaption>Over {name}: a part of the validation text, read during training. "
        f"{_of_seeds(document)}</figcaption></figure>"
        for axis, name in enumerate(AXES)
    )
    samples = "".join(
        f'<div class="card"><h3>{escape(each["name"])}</h3><pre><strong>{escape(document["prompt"])}</strong>'
        f"{escape(each['sample'])}</pre></div>"
        for each in document["contenders"]
    )
    measured, shapes = notes(document)
    return leaflet(
        "Comparison",
        f'<p class="lead">{escape(_summary(document))}</p>'
        f'<div class="wide" tabindex="0" role="region" aria-label="Results"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<ul class="muted">{_items(measured)}</ul>'
        '<details class="muted"><summary>The settings of each model</summary>'
        f"<ul>{_items(shapes)}</ul></details>"
        f'<h2>Learning curves</h2><div class="side">{charts}</div>'
        f'<h2>Samples</h2><div class="side">{samples}</div>',
        style=STYLE + ".wide svg { min-width: 30rem; }",
    )


def _items(texts: list[str]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)


def _summary(document: dict[str, Any]) -> str:
    names = [each["name"] for each in document["contenders"]]
    return (
        f"{', '.join(names)}: trained on {document['text']} with the same budget, {_budget(document)} each."
    )


def _of_seeds(document: dict[str, Any]) -> str:
    count = len(document["seeds"])
    return f"Mean of {count} seeds, in a band from the lowest to the highest." if count > 1 else "One seed."
