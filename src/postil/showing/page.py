r"""The pictures as one interactive HTML file.

Choose a kind, a layer and a head; point at a token, or walk with the arrow keys, and the text is shaded by
what that token read. Every value is there as text too, for those who hear the page or do not see the shades.
"""

from __future__ import annotations

import base64
from typing import Any

from postil.leaflet import data_block, leaflet
from postil.showing.weights import Picture

__all__ = ["as_page"]


def as_page(pictures: list[Picture], tokens: list[str], title: str) -> str:
    r"""Write all pictures and the text they are of as one HTML file that needs nothing else."""
    data = {"tokens": tokens, "pictures": [_packed(each) for each in pictures]}
    body = f"""<p class="muted">Row: the token that reads. Column: the token that is read. What was
read is not yet what it was used for.</p>
<form class="choose">
<label>Picture <select id="kind"></select></label>
<label>Layer <select id="layer"></select></label>
<label>Part <select id="part"></select></label>
</form>
<div class="side">
<figure id="figure"><canvas id="map" tabindex="0" role="img" aria-label="The chosen matrix"></canvas>
<figcaption id="range"></figcaption></figure>
<div><p id="said" role="status" aria-live="polite"></p><pre id="text" aria-label="The text"></pre>
<table><thead><tr><th scope="col" id="what">reads</th><th scope="col" id="unit">weight</th></tr></thead>
<tbody id="top"></tbody></table>
</div></div>
<noscript><p>The pictures need JavaScript; the same ones are beside this file as SVG and PNG.</p></noscript>
{data_block("data", data)}"""
    return leaflet(title, body, _SCRIPT, _STYLE)


# A byte a value is as fine as a screen can show, and keeps a file of many heads small enough to send. Weights
# get the whole byte in each row: the later a token, the smaller its weights.
def _packed(picture: Picture) -> dict[str, Any]:
    values = picture.values.float().cpu()
    low = min(0.0, float(values.min()))
    highest = values.amax(dim=1).clamp(min=0.0)
    scales = (highest.max().expand_as(highest) if picture.signed else highest).sub(low) / 255
    levels = ((values - low) / scales.clamp(min=1e-30)[:, None]).round().clamp(0, 255).byte().contiguous()
    return {
        "kind": picture.kind,
        "layer": picture.layer,
        "part": picture.part,
        "rows": values.shape[0],
        "columns": list(picture.columns) or values.shape[1],
        "text": picture.over_text,
        "signed": picture.signed,
        "low": low,
        "scales": [float(f"{scale:.5g}") for scale in scales.tolist()],
        "levels": base64.b64encode(levels.numpy().tobytes()).decode(),
    }


_STYLE = """
.choose { display: flex; flex-wrap: wrap; gap: 16px; margin: 1em 0; }
select { font: inherit; color: inherit; background: var(--panel); border: 1px solid var(--line);
  border-radius: 6px; padding: 2px 8px; }
canvas { width: 100%; max-width: 560px; image-rendering: pixelated; border: 1px solid var(--line); }
#text span { padding: 1px 0; cursor: pointer; }
#text .reader { outline: 2px solid var(--accent); border-radius: 2px; }
#text { margin-bottom: 1em; font-size: 1rem; }
#top td { min-width: 7em; }
#top td:first-child { white-space: pre; }
"""

_SCRIPT = r"""
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const get = (id) => document.getElementById(id);
const selects = ['kind', 'layer', 'part'].map(get);
// The last token has all others to read from.
let picture, levels, row = data.tokens.length - 1, column = -1;

const shown = (t) => t === '\n' ? '\u23ce' : t;
const value = (r, c) => picture.low + picture.scales[r] * levels[r * width() + c];
const width = () => Array.isArray(picture.columns) ? picture.columns.length : picture.columns;
const name = (c) => picture.text ? `${shown(data.tokens[c])} (${c + 1})` : picture.columns[c];

function fill(select, values, label) {
  const before = select.value;
  select.replaceChildren(...values.map((v) => new Option(label(v), v)));
  if (values.map(String).includes(before)) select.value = before;
}
function choose() {
  const [kind, layer, part] = selects;
  const unique = (list) => [...new Set(list)];
  fill(kind, unique(data.pictures.map((p) => p.kind)), String);
  const ofKind = data.pictures.filter((p) => p.kind === kind.value);
  fill(layer, unique(ofKind.map((p) => p.layer)), (n) => n === 0 ? 'all' : String(n));
  const ofLayer = ofKind.filter((p) => String(p.layer) === layer.value);
  fill(part, ofLayer.map((p) => p.part), String);
  picture = ofLayer.find((p) => p.part === part.value);
  levels = Uint8Array.from(atob(picture.levels), (c) => c.charCodeAt(0));
  get('figure').hidden = !picture.text;
  get('what').textContent = picture.text ? 'reads' : 'made of';
  get('unit').textContent = picture.signed ? 'bias' : 'weight';
  row = Math.min(row, picture.rows - 1);
  paint();
}
function paint() {
  const canvas = get('map'), n = width();
  canvas.width = n; canvas.height = picture.rows;
  canvas.style.aspectRatio = `${n} / ${Math.max(picture.rows, n / 8)}`;
  const image = new ImageData(n, picture.rows);
  const style = getComputedStyle(document.documentElement);
  const rgb = (v) => style.getPropertyValue(v).trim().match(/\w\w/g).map((h) => parseInt(h, 16));
  const paper = rgb('--page'), up = rgb('--accent'), down = rgb('--series1');
  for (let r = 0; r < picture.rows; r++) for (let c = 0; c < n; c++) {
    const v = value(r, c) / bound(r), ink = v < 0 ? down : up;
    const share = Math.abs(v) * (r === row ? 1 : 0.8), at = 4 * (r * n + c);
    for (let i = 0; i < 3; i++) image.data[at + i] = paper[i] + (ink[i] - paper[i]) * share;
    image.data[at + 3] = 255;
  }
  canvas.getContext('2d').putImageData(image, 0, 0);
  const high = picture.low + 255 * Math.max(...picture.scales);
  get('range').textContent = picture.signed
    ? `From ${picture.low.toFixed(3)} (red) over 0 to ${high.toFixed(3)} (blue).`
    : `Each row is shaded by its own largest weight; the largest of all is ${high.toFixed(3)}.`;
  say();
}
// Later tokens share their weight among more; on one scale for all, only the first rows would be seen.
function bound(r) {
  const high = picture.low + 255 * picture.scales[r];
  return Math.max(-picture.low, high) || 1;
}
function say() {
  const n = width(), size = (c) => Math.abs(value(row, c));
  const order = [...Array(n).keys()].sort((a, b) => size(b) - size(a));
  const reader = picture.text ? name(row) : picture.part;
  get('said').textContent =
    column < 0 || column >= n ? reader : `${reader}, ${name(column)}: ${value(row, column).toFixed(3)}`;
  get('top').replaceChildren(...order.slice(0, 8).filter((c) => value(row, c)).map((c) => {
    const line = document.createElement('tr');
    for (const text of [name(c), value(row, c).toFixed(3)]) line.insertCell().textContent = text;
    const long = 100 * size(c) / size(order[0]), ink = value(row, c) < 0 ? '--series1' : '--accent';
    const bar = `color-mix(in srgb, var(${ink}) 22%, transparent) ${long}%`;
    line.style.background = `linear-gradient(to right, ${bar}, transparent ${long}%)`;
    return line;
  }));
  if (!picture.text) { get('text').replaceChildren(); return; }
  get('text').replaceChildren(...data.tokens.map((token, c) => {
    const span = document.createElement('span');
    span.textContent = token === '\n' ? '\u23ce\n' : token;
    const share = Math.round(60 * size(c) / bound(row)), ink = value(row, c) < 0 ? '--series1' : '--accent';
    span.style.background = `color-mix(in srgb, var(${ink}) ${share}%, transparent)`;
    if (c === row) span.className = 'reader';
    span.onclick = () => { row = c; column = -1; paint(); };
    return span;
  }));
}
for (const kind of ['pointermove', 'pointerdown']) get('map').addEventListener(kind, (event) => {
  const box = event.target.getBoundingClientRect();
  const at = (x, size, count) => Math.max(0, Math.min(count - 1, Math.floor(x / size * count)));
  const r = at(event.clientY - box.top, box.height, picture.rows);
  const c = at(event.clientX - box.left, box.width, width());
  if (r !== row || c !== column) { row = r; column = c; paint(); }
});
get('map').addEventListener('keydown', (event) => {
  const steps = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key];
  if (!steps) return;
  event.preventDefault();
  row = Math.max(0, Math.min(picture.rows - 1, row + steps[0]));
  column = Math.max(0, Math.min(width() - 1, column + steps[1]));
  paint();
});
for (const select of selects) select.addEventListener('change', choose);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', paint);
choose();
"""
