r"""The Attention Free Transformer on pictures.

The paper models pictures pixel by pixel: each is a sequence in raster order, and every pixel is predicted
from those before it. Here it is done small, on the 1,797 handwritten digits that come with scikit-learn:
8 x 8 pixels of 17 grey levels. The measure is the loss in bits a pixel, *bits per dimension*; guessing
uniformly costs $\log_2 17 = 4.09$.

    python -m postil.experiments.aft_images --variant conv-2d --out digits.png

Three members take the same place in the same layers: `local` knows pixels less than a window apart in raster
order, `conv` shares its biases along the sequence, and `conv-2d` knows what is above and what is to the left.

## Try it

The upper half of the picture is drawn by the model, the lower half is of real digits it has not seen. Take
another member of the family and compare bits per dimension.

```python notebook parameters
variant, updates = "conv-2d", 300
```

```python notebook
torch.manual_seed(0)
training, test = digits()
model = build(variant)
losses = train(model, training, updates)
print(f"{bits_per_dimension(model, test):.3f} bits per dimension on new digits")
```

```python notebook
from matplotlib import pyplot

_, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5))
left.plot(losses)
left.set(xlabel="update", ylabel="bits per dimension")
right.imshow(contact_sheet(torch.cat([sample(model, 64), test[:64]])), cmap="gray")
right.set_axis_off()
```

:requires: postil[plot,images]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from postil.language_model import LanguageModel, next_token_loss
from postil.mixer import CausalMixer
from postil.mixers.aft import AFTConv, AFTConv2d, AFTLocal
from postil.transformer.encoder_decoder import CausalStack, Generator
from postil.transformer.feed_forward import feed_forward
from postil.transformer.layers import TransformerLayer
from postil.transformer.positions import EmbeddingsWithLearnedPositionalEncoding

__all__ = ["VARIANTS", "bits_per_dimension", "build", "digits", "sample", "train"]

WIDTH, LEVELS = 8, 17
PIXELS = WIDTH * WIDTH
START = LEVELS
HEADS, D_MODEL, N_LAYERS = 8, 64, 4

VARIANTS: dict[str, Callable[[], CausalMixer]] = {
    "local": lambda: AFTLocal(D_MODEL, PIXELS, 2 * WIDTH),
    "conv": lambda: AFTConv(HEADS, D_MODEL, 2 * WIDTH),
    "conv-2d": lambda: AFTConv2d(HEADS, D_MODEL, WIDTH, 5),
}


# The last pictures of the list are for testing, always the same ones.
def digits() -> tuple[Int[Tensor, "N P"], Int[Tensor, "M P"]]:
    r"""Give the pictures for training and for testing, as grey levels 0 to 16 in raster order.

    Raises:
        ImportError: scikit-learn is not installed; the message says how to get it.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install scikit-learn") from error
    pictures = torch.from_numpy(load_digits(return_X_y=True)[0]).long()
    return pictures[:1500], pictures[1500:]


def build(variant: str) -> LanguageModel:
    r"""Build a model of pictures; it reads grey levels, after one extra symbol that starts each picture."""
    layer = TransformerLayer(
        d_model=D_MODEL,
        self_attn=VARIANTS[variant](),
        feed_forward=feed_forward("gelu", D_MODEL, 4 * D_MODEL, 0.1),
        dropout_prob=0.1,
    )
    embedding = EmbeddingsWithLearnedPositionalEncoding(D_MODEL, LEVELS + 1, PIXELS)
    return LanguageModel(
        embedding, CausalStack(layer, N_LAYERS), Generator(LEVELS + 1, D_MODEL), max_len=PIXELS
    )


# Position $t$ reads the pixels before it and predicts pixel $t$, so the sequence is shifted by one. Its lines
# stay lines: seen from the pixel to be predicted, the kernel's entries name the same neighbours everywhere.
def _shifted(pictures: Int[Tensor, "B P"]) -> Int[Tensor, "B P"]:
    return torch.cat([torch.full_like(pictures[:, :1], START), pictures[:, :-1]], dim=1)


def train(model: LanguageModel, pictures: Int[Tensor, "N P"], updates: int, seed: int = 0) -> list[float]:
    r"""Train on random batches of 64; return the loss of every update in bits per dimension."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=updates)
    losses = []
    model.train()
    for _ in range(updates):
        batch = pictures[torch.randint(len(pictures), (64,), generator=generator)]
        loss = next_token_loss(model(_shifted(batch)), batch) / batch.numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()) / math.log(2))
    return losses


@torch.no_grad()
def bits_per_dimension(model: LanguageModel, pictures: Int[Tensor, "N P"]) -> float:
    r"""Mean of $-\log_2 p(\mathrm{pixel})$ over all pixels, in evaluation mode."""
    model.eval()
    total = sum(float(next_token_loss(model(_shifted(some)), some)) for some in pictures.split(128))
    return total / pictures.numel() / math.log(2)


# The state of a layer is all that is carried from pixel to pixel.
@torch.no_grad()
def sample(model: LanguageModel, count: int, seed: int = 0) -> Int[Tensor, "B P"]:
    r"""Draw pictures pixel by pixel."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    ids, state, pixels = torch.full((count,), START), None, []
    for _ in range(PIXELS):
        logits, state = model.step(ids, state)
        # Only grey levels are drawn: the starting symbol never occurs again.
        ids = torch.multinomial(logits[:, :LEVELS].softmax(-1), 1, generator=generator)[:, 0]
        pixels.append(ids)
    return torch.stack(pixels, dim=1)


def contact_sheet(pictures: Int[Tensor, "B P"], columns: int = 16) -> Float[Tensor, "height width"]:
    r"""Lay pictures out side by side, with a margin between them, as numbers from 0 to 1."""
    rows = -(-len(pictures) // columns)
    sheet = torch.zeros(rows * (WIDTH + 1) + 1, columns * (WIDTH + 1) + 1)
    for i, picture in enumerate(pictures):
        y, x = (1 + (WIDTH + 1) * place for place in divmod(i, columns))
        sheet[y : y + WIDTH, x : x + WIDTH] = picture.view(WIDTH, WIDTH) / (LEVELS - 1)
    return sheet


def main(arguments: list[str] | None = None) -> None:
    r"""Train, report bits per dimension, and save samples as a picture."""
    parser = argparse.ArgumentParser(description="AFT on handwritten digits, pixel by pixel")
    parser.add_argument("--variant", choices=VARIANTS, default="conv-2d")
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--out", type=Path, help="save 64 samples and 64 real digits as a picture (PNG)")
    chosen = parser.parse_args(arguments)
    torch.manual_seed(0)
    training, test = digits()
    model = build(chosen.variant)
    train(model, training, chosen.updates)
    seen, unseen = bits_per_dimension(model, training), bits_per_dimension(model, test)
    print(f"{chosen.variant}: {unseen:.3f} bits per dimension on new digits, {seen:.3f} on known ones")
    if chosen.out is not None:
        import matplotlib.image

        sheet = contact_sheet(torch.cat([sample(model, 64), test[:64]]))
        matplotlib.image.imsave(
            chosen.out, sheet.repeat_interleave(6, 0).repeat_interleave(6, 1), cmap="gray"
        )


if __name__ == "__main__":
    main()
