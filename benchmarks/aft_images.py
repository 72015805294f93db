r"""The Attention Free Transformer on pictures, measured: bits per dimension on digits, and samples.

`python benchmarks/aft_images.py` trains the three variants of `postil.experiments.aft_images`, a minute or
two each on one core, and draws what the best of them makes: eight rows of samples above eight rows of real
digits that it has not seen. It needs scikit-learn and matplotlib, and no other library to compare with.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import matplotlib.image
import torch

from measure import write_results
from postil.experiments.aft_images import (
    LEVELS,
    PIXELS,
    VARIANTS,
    bits_per_dimension,
    build,
    contact_sheet,
    digits,
    sample,
    train,
)

PICTURE = Path(__file__).parents[1] / "docs/pictures/aft-images.png"


def measure(variant: str, updates: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Train one variant; return its row of results, and its samples."""
    torch.manual_seed(0)
    training, test = digits()
    model, start = build(variant), time.thread_time()
    losses = train(model, training, updates)
    row = {
        "what": "digits, 8 x 8 pixels of 17 grey levels",
        "name": variant,
        "parameters": sum(p.numel() for p in model.parameters()),
        "updates": updates,
        "thread_seconds": round(time.thread_time() - start, 1),
        "bits_per_dimension": round(bits_per_dimension(model, test), 4),
        "bits_per_dimension_of_training": round(bits_per_dimension(model, training), 4),
        "curve": [[i + 50, round(sum(losses[i : i + 50]) / 50, 4)] for i in range(0, len(losses) - 49, 50)],
    }
    return row, sample(model, 128)


# The floor of a model that knows how often each pixel takes each grey level, and nothing of its neighbours.
def independent_pixels() -> dict[str, Any]:
    training, test = digits()
    counts = torch.ones(PIXELS, LEVELS)
    for pixel in range(PIXELS):
        counts[pixel] += torch.bincount(training[:, pixel], minlength=LEVELS)
    found = (counts / counts.sum(1, keepdim=True)).log2().expand(len(test), -1, -1)
    bits = -float(found.gather(2, test[..., None]).mean())
    return {
        "what": "digits, 8 x 8 pixels of 17 grey levels",
        "name": "every pixel by itself",
        "parameters": PIXELS * (LEVELS - 1),
        "bits_per_dimension": round(bits, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=400)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows, best = [independent_pixels()], torch.empty(0)
    for variant in VARIANTS:
        row, samples = measure(variant, chosen.updates)
        if row["bits_per_dimension"] < min(r["bits_per_dimension"] for r in rows):
            best = samples
        rows.append(row)
        print({key: value for key, value in row.items() if key != "curve"})
        write_results("aft-images", rows, ("scikit-learn",))
    sheet = contact_sheet(torch.cat([best, digits()[1][:128]]))
    matplotlib.image.imsave(PICTURE, sheet.repeat_interleave(4, 0).repeat_interleave(4, 1), cmap="gray")


if __name__ == "__main__":
    main()
