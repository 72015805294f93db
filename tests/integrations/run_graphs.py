"""Greedy text from exported graphs, by what `export.json` says and nothing of Postil's.

Usage: python run_graphs.py FOLDER TOKENS ID ID ...; prints the ids as JSON.
"""

import json
import sys
from pathlib import Path

import numpy as np


def load(path):
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return lambda named: session.run(None, named)
    import torch

    program = torch.export.load(path).module()
    return lambda named: [y.detach().numpy() for y in program(*map(torch.from_numpy, named.values()))]


folder, count, *prompt = Path(sys.argv[1]), int(sys.argv[2]), *map(int, sys.argv[3:])
described = json.loads((folder / "export.json").read_text())
graphs = {name: load(folder / described[name]["file"]) for name in ("prefill", "step")}


def call(name, *arrays):
    results = graphs[name](dict(zip(described[name]["inputs"], arrays, strict=True)))
    assert len(results) == len(described[name]["outputs"])
    return results


# Where prefill takes one token only, the rest of the prompt is read by steps.
whole = described["prefill"]["inputs"]["ids"][1] == "T"
read = len(prompt) if whole else 1
logits, *state = call("prefill", np.array([prompt[:read]]))
logits, text = logits[:, -1], list(prompt)
for position in range(read, len(prompt) + count):
    if position == len(text):
        text.append(int(logits[0].argmax()))
    if position < len(prompt) + count - 1:
        logits, *state = call("step", np.array([text[position]]), np.array(position), *state)
print(json.dumps(text))
