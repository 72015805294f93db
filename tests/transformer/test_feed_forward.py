"""Feed-forward networks: each kind against its equation, biases by name, errors that name the value."""

import pytest
import torch
from torch import nn

from postil.transformer import FEED_FORWARDS, FeedForward, GatedFeedForward, feed_forward

F = {
    "relu": lambda u: u.clamp(min=0),
    "gelu": lambda u: u * 0.5 * (1 + torch.erf(u / 2**0.5)),
    "glu": lambda u: 1 / (1 + torch.exp(-u)),
    "bilinear": lambda u: u,
    "reglu": lambda u: u.clamp(min=0),
    "geglu": lambda u: u * 0.5 * (1 + torch.erf(u / 2**0.5)),
    "swiglu": lambda u: u / (1 + torch.exp(-u)),
}


@pytest.mark.parametrize("kind", FEED_FORWARDS)
def test_each_kind_is_its_equation(kind):
    network = feed_forward(kind, 6, 10, 0.0).double()
    x = torch.randn(4, 3, 6, dtype=torch.float64)
    hidden = F[kind](network.layer1(x))
    if isinstance(network, GatedFeedForward):
        hidden = hidden * (x @ network.linear_v.weight.T)
    torch.testing.assert_close(network(x), network.layer2(hidden), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(network, (x.requires_grad_(),))


def test_the_plain_kinds_have_biases_and_the_gated_ones_none():
    for kind in FEED_FORWARDS:
        network = feed_forward(kind, 6, 10)
        biases = {name for name, _ in network.named_parameters() if "bias" in name}
        assert biases == (set() if isinstance(network, GatedFeedForward) else {"layer1.bias", "layer2.bias"})


def test_biases_are_chosen_by_the_names_of_the_state_dict():
    network = GatedFeedForward(6, 10, biases=["linear_v", "layer2"])
    assert set(network.state_dict()) == {
        "layer1.weight",
        "linear_v.weight",
        "linear_v.bias",
        "layer2.weight",
        "layer2.bias",
    }


def test_an_activation_may_be_a_module_that_learns():
    network = FeedForward(6, 10, 0.0, nn.PReLU())
    network(torch.randn(5, 6)).sum().backward()
    assert network.activation.weight.grad is not None


def test_positions_do_not_mix():
    network = feed_forward("swiglu", 6, 10, 0.0)
    x = torch.randn(4, 3, 6)
    y = network(x)
    changed = x.clone()
    changed[2, 1] += 1
    assert ((network(changed) != y).any(-1).nonzero() == torch.tensor([[2, 1]])).all()


@pytest.mark.case("BC038")
def test_dropout_acts_in_training_only():
    network = FeedForward(6, 64, 0.5)
    x = torch.randn(4, 3, 6)
    assert not torch.equal(network(x), network(x))
    network.eval()
    without = FeedForward(6, 64, 0.0)
    without.load_state_dict(network.state_dict())
    assert torch.equal(network(x), network(x))
    assert torch.equal(network(x), without(x))


@pytest.mark.case("BC033")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"d_model": 0}, "d_model=0"),
        ({"d_ff": -4}, "d_ff=-4"),
        ({"dropout_prob": 1.5}, "dropout_prob=1.5"),
        ({"biases": ["layer3"]}, "layer3.*layer1, layer2"),
        ({"biases": "layer1"}, "layer1, layer2"),
        ({"biases": ["linear_v"]}, "linear_v"),
    ],
)
def test_wrong_sizes_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        FeedForward(**{"d_model": 6, "d_ff": 10, **wrong})


def test_an_unknown_kind_gets_the_list():
    with pytest.raises(ValueError, match=r"'silu' is unknown.*relu.*swiglu"):
        feed_forward("silu", 6, 10)
