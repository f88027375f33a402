"""AdamW by its equation, what decays, the schedule, and state that finds its parameter by name."""

import copy
import math

import pytest
import torch
from torch import nn

from lightning_qrl.optimizer import AdamWSettings


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 5), nn.Linear(5, 2))


def steps(model, optimizer, schedule, numbers):
    for number in numbers:
        g = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=g)
        optimizer.step()
        schedule.step()


def test_two_steps_by_the_equation():
    settings = AdamWSettings(lr=0.01, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-6)
    model = nn.Linear(3, 2, bias=False)
    w = model.weight.detach().double()
    steps(model, *settings.build(model, frozenset(), 10), range(2))
    m = v = torch.zeros_like(w)
    for t in (1, 2):
        grad = torch.randn(2, 3, generator=torch.Generator().manual_seed(t - 1)).double()
        w = w * (1 - 0.01 * 0.3)
        m = 0.8 * m + 0.2 * grad
        v = 0.95 * v + 0.05 * grad**2
        w = w - 0.01 * (m / (1 - 0.8**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-6)
    torch.testing.assert_close(model.weight.detach().double(), w, rtol=0, atol=1e-6)


def test_weights_decay_but_norms_biases_and_the_exempt_do_not():
    model = make_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = AdamWSettings(lr=0.1, weight_decay=0.5)
    optimizer, _ = settings.build(model, frozenset({"2.weight"}), 10)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if name in ("0.weight", "3.weight") else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_frozen_parameters_are_left_out():
    model = make_model()
    model[0].requires_grad_(False)
    optimizer, _ = AdamWSettings().build(model, frozenset(), 10)
    names = {name for group in optimizer.param_groups for name in group["param_names"]}
    assert names == {n for n, _ in model.named_parameters() if not n.startswith("0.")}


@pytest.mark.parametrize("no_decay", [frozenset(), frozenset({"weight"})])
def test_a_group_may_be_empty(no_decay):
    model = nn.Linear(3, 2, bias=False)  # as OLMo: no biases, norms without parameters
    optimizer, schedule = AdamWSettings(weight_decay=0.1).build(model, no_decay, 10)
    steps(model, optimizer, schedule, range(2))
    again, _ = AdamWSettings(weight_decay=0.1).build(model, frozenset(), 10)
    again.load_state_dict(optimizer.state_dict())
    assert float(again.state[model.weight]["step"]) == 2


def test_warmup_then_cosine():
    settings = AdamWSettings(
        lr=2.0,
        schedule="cosine_with_min_lr",
        warmup_steps=2,
        schedule_args={"min_lr_rate": 0.1},
    )
    model = make_model()
    optimizer, schedule = settings.build(model, frozenset(), 6)
    seen = []
    for number in range(7):
        seen.append([group["lr"] for group in optimizer.param_groups])
        steps(model, optimizer, schedule, [number])
    cosine = [0.5 * (1 + math.cos(math.pi * t / 4)) * 0.9 + 0.1 for t in range(5)]
    want = [2 * x for x in (0, 0.5, *cosine)]
    assert [a for a, _ in seen] == pytest.approx(want)
    assert [b for _, b in seen] == pytest.approx(want)


def resumed(no_decay_before, no_decay_after, weight_decay=0.1):
    """Parameters after 3 + 3 steps with a reload in between, and after 6 without."""
    settings = AdamWSettings(lr=0.01, weight_decay=weight_decay, warmup_steps=4)
    straight, first = make_model(), make_model()
    build = [settings.build(straight, no_decay_before, 10)]
    steps(straight, *build[0], range(6))
    saved_optimizer, saved_schedule = settings.build(first, no_decay_before, 10)
    steps(first, saved_optimizer, saved_schedule, range(3))
    second = copy.deepcopy(first)
    optimizer, schedule = settings.build(second, no_decay_after, 10)
    optimizer.load_state_dict(copy.deepcopy(saved_optimizer.state_dict()))
    schedule.load_state_dict(saved_schedule.state_dict())
    for name, parameter in second.named_parameters():
        kept = saved_optimizer.state[first.get_parameter(name)]
        assert kept.keys() == optimizer.state[parameter].keys()
        for key, value in kept.items():
            assert torch.equal(value, optimizer.state[parameter][key]), (name, key)
    steps(second, optimizer, schedule, range(3, 6))
    return list(straight.parameters()), list(second.parameters())


def test_equal_groups_resume_bit_for_bit():
    for no_decay in (frozenset(), frozenset({"0.weight", "2.weight"})):
        straight, second = resumed(no_decay, no_decay)
        assert all(map(torch.equal, straight, second))


@pytest.mark.parametrize("before", [frozenset(), frozenset({"0.weight"}), frozenset({"3.weight"})])
@pytest.mark.parametrize("after", [frozenset(), frozenset({"2.weight"})])
def test_other_groups_get_each_state_by_name(before, after):
    # the weights have different shapes: a state at the wrong parameter could not even be stepped
    straight, second = resumed(before, after, weight_decay=0.0)
    assert all(map(torch.equal, straight, second))


def test_settings_of_the_new_run_hold_and_its_learning_rate_keeps_the_place_in_the_schedule():
    model = make_model()
    old, schedule = AdamWSettings(lr=0.01, warmup_steps=10).build(model, frozenset(), 20)
    steps(model, old, schedule, range(4))
    new = AdamWSettings(lr=0.03, weight_decay=0.2, betas=(0.5, 0.6), warmup_steps=10)
    optimizer, _ = new.build(model, frozenset(), 20)
    optimizer.load_state_dict(old.state_dict())
    for group, decay in zip(optimizer.param_groups, (0.2, 0.0), strict=True):
        assert group["lr"] == pytest.approx(0.03 * 4 / 10)
        assert group["weight_decay"] == decay
        assert group["betas"] == (0.5, 0.6)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"lr": 0.0}, "lr must be above 0"),
        ({"lr": float("nan")}, "lr must be above 0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0"),
    ],
)
def test_settings_out_of_range(wrong, says):
    with pytest.raises(ValueError, match=says):
        AdamWSettings(**wrong)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"schedule": "cosin"}, "did you mean cosine"),
        ({"schedule_args": {"min_lr_rate": 0.1}}, "constant_with_warmup has no argument"),
        ({"schedule": "cosine", "schedule_args": {"num_cycle": 1}}, "did you mean num_cycles"),
    ],
)
def test_a_schedule_or_an_argument_that_is_not_known_is_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        AdamWSettings(**settings)
