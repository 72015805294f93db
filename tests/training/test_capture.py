import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from postil.training import capture, checkpoints

torch.set_num_threads(1)


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))


def adamw(module, order=1):
    decay = [p for p in module.parameters() if p.ndim == 2][::order]
    rest = [p for p in module.parameters() if p.ndim == 1][::order]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}][::order]
    return torch.optim.AdamW(groups, lr=0.01)


def update(module, optimizer):
    loss = module(torch.randn(5, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


# The order of groups and parameters is turned round on the resumed side: only names can match them.
@pytest.mark.parametrize("order", [1, -1])
def test_training_goes_on_bit_by_bit_through_the_disk(tmp_path, order):
    straight = model()
    optimizer = adamw(straight)
    for _ in range(3):
        update(straight, optimizer)
    tensors, values = capture.optimizer_state(optimizer, straight.named_parameters())
    states, words = capture.random_state()
    groups = {"model": straight.state_dict(), "optimizer": tensors, "random": states}
    path = checkpoints.save(tmp_path, 3, groups, {"optimizer": values, "random": words})
    expected = [update(straight, optimizer) for _ in range(3)]

    resumed = model(seed=1)
    again = adamw(resumed, order)
    saved = checkpoints.load(path)
    resumed.load_state_dict(saved.tensors["model"])
    capture.restore_optimizer(
        again, resumed.named_parameters(), saved.tensors["optimizer"], saved.metadata["optimizer"]
    )
    capture.restore_random(saved.tensors["random"], saved.metadata["random"])
    assert [update(resumed, again) for _ in range(3)] == expected
    for name, parameter in straight.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name))
    assert {key.rsplit(".", 1)[1] for key in tensors} == {"step", "exp_avg", "exp_avg_sq"}
    assert "0.weight.exp_avg" in tensors


def test_options_come_back_with_their_types():
    module = model()
    optimizer = adamw(module)
    optimizer.param_groups[0]["lr"] = 0.123456789012345678
    tensors, values = capture.optimizer_state(optimizer, module.named_parameters())
    again = adamw(module)
    capture.restore_optimizer(again, module.named_parameters(), tensors, json.loads(json.dumps(values)))
    assert again.state_dict() == optimizer.state_dict()


def test_slots_that_are_no_tensors_come_back():
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.0)
    update(module, optimizer)
    optimizer.state[module[0].weight]["count"] = 3
    tensors, values = capture.optimizer_state(optimizer, module.named_parameters())
    again = torch.optim.SGD(module.parameters(), lr=0.2)
    capture.restore_optimizer(again, module.named_parameters(), tensors, json.loads(json.dumps(values)))
    assert again.state_dict() == optimizer.state_dict()


def test_names_of_a_compiled_model_are_plain():
    module = model()
    optimizer = adamw(module)
    update(module, optimizer)
    compiled = torch.compile(module)
    assert capture.unwrapped(compiled) is module and capture.unwrapped(module) is module
    plain, _ = capture.optimizer_state(optimizer, module.named_parameters())
    wrapped, _ = capture.optimizer_state(optimizer, compiled.named_parameters())
    assert plain.keys() == wrapped.keys()


# Tracing only: what wrapping does to names does not depend on the code generator behind it.
def compiled(module):
    return torch.compile(module, backend="eager")


@pytest.mark.case("BC041")
@pytest.mark.parametrize("saved, loaded", [(compiled, nn.Identity), (nn.Identity, compiled)])
def test_a_compiled_model_and_a_plain_one_read_each_others_checkpoints(tmp_path, saved, loaded):
    one, other = model(), model(seed=1)
    first = saved(one) if saved is compiled else one
    second = loaded(other) if loaded is compiled else other
    optimizer = adamw(one)
    for _ in range(5):
        update(first, optimizer)
    tensors, values = capture.optimizer_state(optimizer, first.named_parameters())
    path = checkpoints.save(
        tmp_path, 5, {"model": first.state_dict(), "optimizer": tensors}, {"optimizer": values}
    )
    found = checkpoints.load(path)
    capture.unwrapped(second).load_state_dict(found.tensors["model"], strict=True)
    again = adamw(other)
    named = second.named_parameters()
    capture.restore_optimizer(again, named, found.tensors["optimizer"], found.metadata["optimizer"])
    losses = []
    for module, of in ((first, optimizer), (second, again)):
        torch.manual_seed(2)
        losses.append([update(module, of) for _ in range(2)])
    assert losses[0] == losses[1]
    assert not any("_orig_mod" in name for group in found.tensors.values() for name in group)


def test_another_model_is_refused_by_name():
    module = model()
    optimizer = adamw(module)
    update(module, optimizer)
    tensors, values = capture.optimizer_state(optimizer, module.named_parameters())
    other = nn.Sequential(nn.Linear(3, 4))
    with pytest.raises(
        ValueError, match=r"differ from the saved ones, first at \['0.bias', '0.weight', '2.bias'\]"
    ):
        capture.restore_optimizer(adamw(other), other.named_parameters(), tensors, values)
    with pytest.raises(ValueError, match="a parameter that the model does not"):
        capture.optimizer_state(optimizer, other.named_parameters())
    with pytest.raises(ValueError, match="saved optimizer state of"):
        capture.restore_optimizer(
            optimizer, module.named_parameters(), {"9.weight.exp_avg": torch.ones(1)}, values
        )


def draws(generator):
    numbers = [*torch.rand(3).tolist(), *np.random.standard_normal(3), random.random(), random.gauss(0, 1)]
    return [*numbers, *torch.rand(2, generator=generator).tolist()]


def test_every_generator_comes_back():
    generator = torch.Generator().manual_seed(3)
    draws(generator)
    np.random.standard_normal(1)
    tensors, values = capture.random_state({"data": generator})
    values = json.loads(json.dumps(values))
    expected = draws(generator)
    fresh = torch.Generator()
    capture.restore_random(tensors, values, {"data": fresh})
    assert draws(fresh) == expected
    with pytest.raises(ValueError, match=r"no saved state of the random generators \['other'\]"):
        capture.restore_random(tensors, values, {"other": fresh})


# In a process of its own: the shape checks that run under pytest draw from Python's generator themselves.
def test_saving_draws_from_no_generator(tmp_path):
    code = (
        "import sys\n"
        "from postil.training import capture, checkpoints\n"
        "tensors, values = capture.random_state()\n"
        "for step in (1, 1, 2):\n"
        "    checkpoints.save(sys.argv[1], step, {'random': tensors}, values, keep=1)\n"
        "checkpoints.latest(sys.argv[1])\n"
        "after, words = capture.random_state()\n"
        "assert after['torch'].equal(tensors['torch']) and words == values\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)


def test_differing_conditions_are_named():
    now = capture.conditions()
    assert set(now) == {"torch", "threads", "cpu_capability", "world_size", "device"}
    assert json.loads(json.dumps(now)) == now
    assert capture.differences(now, now) == []
    assert capture.differences({**now, "threads": 7, "world_size": 2}, now) == [
        "threads: 7 when saved, 1 now",
        "world_size: 2 when saved, 1 now",
    ]
    assert capture.differences({}, now) == []
