"""The experiment on pictures: it learns, it draws, it says what it needs."""

import math

import pytest
import torch

from postil.experiments.aft_images import VARIANTS, bits_per_dimension, build, contact_sheet, sample, train


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_learns_stripes_and_draws_them(variant: str) -> None:
    torch.manual_seed(0)
    # Pictures of vertical stripes, two grey levels: after two lines nothing is left to guess.
    columns = torch.randint(0, 2, (128, 1, 8)) * 16
    pictures = columns.expand(-1, 8, -1).flatten(1)
    model = build(variant)
    before = bits_per_dimension(model, pictures)
    losses = train(model, pictures, updates=15)
    assert before > 3.5
    assert bits_per_dimension(model, pictures) < 1.6 < before
    assert losses[-1] < losses[0]
    drawn = sample(model, 3)
    assert drawn.shape == (3, 64) and 0 <= int(drawn.min()) <= int(drawn.max()) <= 16
    assert torch.equal(drawn, sample(model, 3))
    sheet = contact_sheet(drawn, columns=2)
    assert sheet.shape == (19, 19) and 0 <= float(sheet.min()) <= float(sheet.max()) <= 1


def test_an_untrained_model_knows_nothing_of_the_future() -> None:
    model = build("conv-2d").eval()
    pixels = torch.randint(0, 17, (2, 64))
    changed = pixels.clone()
    changed[:, 40] = (changed[:, 40] + 5) % 17
    with torch.no_grad():
        assert torch.equal(model(pixels)[:, :40], model(changed)[:, :40])
    assert abs(bits_per_dimension(model, pixels) - math.log2(18)) < 1.5
