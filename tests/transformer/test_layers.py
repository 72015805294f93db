"""The transformer layer around any mixer, and stacks of layers that start independent."""

import copy

import pytest
import torch
from torch import nn
from toy_mixers import MeanMixer, TorchAttention

from postil.masks import Mask
from postil.transformer import FeedForward, TransformerLayer, clone_layers


def layer(d_model=8, src=False, dropout=0.0, mixer=MeanMixer):
    return TransformerLayer(
        d_model=d_model,
        self_attn=mixer(d_model),
        src_attn=mixer(d_model) if src else None,
        feed_forward=FeedForward(d_model, 16, dropout),
        dropout_prob=dropout,
    )


def test_a_layer_is_its_equation():
    decoder = layer(src=True).double()
    x, src = torch.randn(5, 2, 8).double(), torch.randn(7, 2, 8).double()
    mask, src_mask = Mask(causal=True), Mask.padding(torch.tensor([7, 4]), 7)
    z = decoder.norm_self_attn(x)
    y = x + decoder.self_attn(query=z, key=z, value=z, mask=mask)
    z = decoder.norm_src_attn(y)
    y = y + decoder.src_attn(query=z, key=src, value=src, mask=src_mask)
    y = y + decoder.feed_forward(decoder.norm_ff(y))
    torch.testing.assert_close(decoder(x=x, mask=mask, src=src, src_mask=src_mask), y, rtol=0, atol=1e-14)


def test_state_dict_names():
    assert {name.split(".")[0] for name in layer(src=True).state_dict()} == {
        "self_attn",
        "src_attn",
        "feed_forward",
        "norm_self_attn",
        "norm_src_attn",
        "norm_ff",
    }
    assert not any("src" in name for name in layer().state_dict())


@pytest.mark.parametrize("src", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 3, 6])
def test_prefill_and_steps_give_the_rows_of_forward(src, cut):
    decoded = layer(src=src).double()
    x = torch.randn(6, 2, 8).double()
    source = {"src": torch.randn(7, 2, 8).double(), "src_mask": Mask.padding(torch.tensor([7, 4]), 7)}
    source = source if src else {}
    expected = decoded(x=x, mask=Mask(causal=True), **source)
    rows, state = [], None
    if cut:
        y, state = decoded.prefill(x[:cut], **source)
        rows.extend(y)
    for x_t in x[cut:]:
        y_t, state = decoded.step(x_t, state, **source)
        rows.append(y_t)
    torch.testing.assert_close(torch.stack(rows), expected, rtol=0, atol=1e-10)


@pytest.mark.case("BC038")
def test_dropout_acts_in_training_only():
    dropping, x = layer(dropout=0.5), torch.randn(5, 2, 8)
    assert not torch.equal(dropping(x=x), dropping(x=x))
    dropping.eval()
    without = layer()
    without.load_state_dict(dropping.state_dict())
    assert torch.equal(dropping(x=x), dropping(x=x))
    assert torch.equal(dropping(x=x), without(x=x))


@pytest.mark.case("BC034")
def test_one_position_and_one_row_keep_their_axes():
    one, x = layer(), torch.randn(1, 4, 8)
    y = one(x=x[:, :1])
    assert y.shape == (1, 1, 8)
    torch.testing.assert_close(y, one(x=x)[:, :1], rtol=0, atol=1e-6)


def test_a_source_and_its_attention_belong_together():
    x = torch.randn(5, 2, 8)
    with pytest.raises(ValueError, match="no src_attn"):
        layer()(x=x, src=x)
    with pytest.raises(ValueError, match="no src was given"):
        layer(src=True)(x=x)


def test_a_mixer_without_states_says_so_when_decoded():
    fixed = layer(mixer=lambda d_model: TorchAttention(d_model, 2))
    with pytest.raises(TypeError, match="TorchAttention has no prefill and step"):
        fixed.prefill(torch.randn(3, 2, 8))


@pytest.mark.case("BC033")
def test_widths_must_agree():
    with pytest.raises(ValueError, match=r"self_attn has d_model=6.*d_model=8"):
        TransformerLayer(d_model=8, self_attn=MeanMixer(6), feed_forward=FeedForward(8, 16), dropout_prob=0.1)
    with pytest.raises(ValueError, match=r"src_attn has d_model=4.*d_model=8"):
        TransformerLayer(
            d_model=8,
            self_attn=MeanMixer(8),
            src_attn=MeanMixer(4),
            feed_forward=FeedForward(8, 16),
            dropout_prob=0.1,
        )
    with pytest.raises(ValueError, match=r"dropout_prob=1.5"):
        layer(dropout=1.5)


# --- stacks


def test_the_given_layer_is_the_first_and_keeps_its_parameters():
    given = layer()
    before = copy.deepcopy(given.state_dict())
    layers = clone_layers(given, 3)
    assert layers[0] is given
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())


def test_layers_start_different():
    layers = clone_layers(layer(src=True), 4)
    for name, _ in layers[0].named_parameters():
        # A norm starts at ones and zeros in every layer; it has nothing to draw.
        if "norm" in name:
            continue
        drawn = [stacked.get_parameter(name) for stacked in layers]
        for i in range(4):
            for j in range(i):
                assert (drawn[i] != drawn[j]).all(), name


def test_layers_start_from_one_distribution():
    layers = clone_layers(layer(d_model=64), 30)
    weights = torch.stack([stacked.self_attn.linear.weight.detach() for stacked in layers]).flatten(1)
    # Uniform on +-1/8: each of 30 samples of 4096 has a mean within 5 standard errors of 0 (0.0056) and a
    # deviation within 5 of theirs of 0.125/sqrt(3) (0.0026); so has the first, which was not drawn anew.
    assert weights.mean(1).abs().max() < 0.0057
    assert (weights.std(1) - 0.125 / 3**0.5).abs().max() < 0.0026
    assert weights.abs().max() <= 0.125


class ScaledOutput(MeanMixer):
    """Draws its child's weight in a way of its own, which must have the last word."""

    def __init__(self, d_model):
        super().__init__(d_model)
        self.reset_parameters()

    def reset_parameters(self):
        super().reset_parameters()
        with torch.no_grad():
            self.linear.weight.mul_(1e-3)


def test_a_parent_that_draws_its_childs_parameters_has_the_last_word():
    layers = clone_layers(layer(mixer=ScaledOutput), 3)
    assert all(stacked.self_attn.linear.weight.abs().max() < 1e-3 for stacked in layers)


class Unresettable(MeanMixer):
    """Owns a parameter of its own, inside a child that cannot draw it."""

    def __init__(self, d_model):
        super().__init__(d_model)
        self.inner = nn.MultiheadAttention(d_model, 2)


def test_parameters_nobody_can_draw_are_named():
    with pytest.raises(TypeError, match=r"MultiheadAttention at 'self_attn.inner' .* no reset_parameters"):
        clone_layers(layer(mixer=Unresettable), 2)
    # One layer needs no copies, so nothing has to be drawn.
    assert len(clone_layers(layer(mixer=Unresettable), 1)) == 1


@pytest.mark.case("BC033")
def test_no_layers_is_an_error():
    with pytest.raises(ValueError, match="n_layers=0"):
        clone_layers(layer(), 0)
