r"""A leaflet: one HTML file that carries everything it shows.

Reports are sent by mail, kept beside a run for years, and opened from a disk with no network. So a leaflet
asks nobody for anything: style, script, figures and data stand in the file, and its security policy forbids
the rest. It wears the colours of the annotated site and follows the reader's choice of light or dark.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

__all__ = ["DARK", "HUES", "LIGHT", "data_block", "leaflet"]

LIGHT = {
    "page": "#ffffff",
    "panel": "#f6f8fa",
    "text": "#1f2328",
    "muted": "#57606a",
    "line": "#d8dee4",
    "accent": "#0550ae",
}
DARK = {
    "page": "#0d1117",
    "panel": "#151b23",
    "text": "#e6edf3",
    "muted": "#9198a1",
    "line": "#2f3742",
    "accent": "#79c0ff",
}

# Seven hues that keep 4.5:1 against their page, in light and in dark.
HUES = (
    ("#0550ae", "#79c0ff"),
    ("#a0111f", "#ff9492"),
    ("#116329", "#7ee787"),
    ("#6639ba", "#d2a8ff"),
    ("#7d3c00", "#ffb77c"),
    ("#0a6470", "#76e3ea"),
    ("#8a1f6b", "#ff9bce"),
)

_STYLE = """
*, ::before, ::after { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 28px 40px; background: var(--page); color: var(--text);
  font: 1rem/1.65 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", Arial, sans-serif; }
h1, h2 { line-height: 1.25; text-wrap: balance; }
h2 { margin: 1.6em 0 .5em; }
.muted, figcaption, caption { color: var(--muted); font-size: .875rem; text-align: left; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line);
  text-align: right; white-space: nowrap; }
thead th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
code, pre { font: .875em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.side { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 24px; }
figure { margin: 0; min-width: 0; }
svg { width: 100%; height: auto; }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 14px; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
@media (max-width: 700px) { body { padding: 20px; } }
"""


def leaflet(title: str, body: str, script: str = "", style: str = "") -> str:
    r"""Give a whole HTML document; `title` is plain text, the others are trusted HTML, JavaScript and CSS."""
    # A policy inside the file holds from file:// too, where no server could send one.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_colours()}{_STYLE}{style}</style>\n</head>\n<body>\n"
        f"<main>\n<h1>{escape(title)}</h1>\n{body}\n</main>\n"
        + (f"<script>{script}</script>\n" if script else "")
        + "</body>\n</html>\n"
    )


def _colours() -> str:
    def names(colours: dict[str, str], side: int) -> str:
        hues = {f"series{n}": pair[side] for n, pair in enumerate(HUES)}
        return "".join(f"--{name}: {value}; " for name, value in {**colours, **hues}.items())

    light, dark = names(LIGHT, 0), names(DARK, 1)
    return (
        f":root {{ color-scheme: light dark; {light}}}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n"
    )


# A text that holds `</script>` would end the block early, and the rest of it would be read as HTML.
def data_block(name: str, value: Any) -> str:
    r"""Embed a value as JSON that a script on the page reads by the element id `name`."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{escape(name)}">{text}</script>'
