"""Loss scaling: exact where nothing overflows; a step that overflows did not happen."""

import warnings

import lightning as L
import pytest
import torch

from callbacks.fp16 import FP16
from callbacks.gradient_noise_scale import GradientNoiseScale
from lightning_qrl.errors import UserError
from lightning_qrl.loss_scaling import LossScaling
from lightning_qrl.precision import PrecisionPlan

NEVER = 10**6  # steps


class Overflow(L.Callback):
    """Makes the gradient of some steps infinite; keeps weights and optimizer state after each."""

    def __init__(self, *steps):
        self.steps = steps
        self.weights, self.moments = [], []

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step in self.steps:
            loss.register_hook(lambda gradient: gradient * torch.inf)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if not self.weights:
            self.keep(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step >= len(self.weights):
            self.keep(trainer, pl_module)

    def keep(self, trainer, pl_module):
        self.weights.append({n: p.clone() for n, p in pl_module.state_dict().items()})
        [optimizer] = trainer.optimizers
        state = [optimizer.state[p] for p in pl_module.parameters() if p in optimizer.state]
        self.moments.append([{k: v.clone() for k, v in each.items()} for each in state])


def same(a, b):
    return all(a[key].equal(b[key]) for key in a) and a.keys() == b.keys()


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2, "gradient_clip_val": 0.01}])
def test_scaling_changes_no_bit_where_nothing_overflows(train, recorder, options):
    """Also of what is logged and clipped: all that reads a gradient sees the unscaled one."""
    plain = train(3, **options).state_dict()
    logged = [step["train/grad_norm"] for step in recorder.steps]
    recorder.records.clear()
    scaling = LossScaling(2.0**16, growth_interval=2)
    scaled = train(3, plugins=[scaling], **options).state_dict()
    assert same(plain, scaled)
    assert [step["train/grad_norm"] for step in recorder.steps] == logged
    assert (scaling.scale, scaling.skipped) == (2.0**17, 0)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_step_that_overflows_is_skipped(train, micro_batches):
    scaling, overflow = LossScaling(2.0**16, NEVER), Overflow(0, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of a schedule that steps first
        train(4, overflow, plugins=[scaling], micro_batches=micro_batches)
    unchanged = [same(a, b) for a, b in zip(overflow.weights, overflow.weights[1:], strict=False)]
    assert unchanged == [True, False, True, False]
    assert overflow.moments[1] == []
    assert all(map(same, overflow.moments[2], overflow.moments[3]))
    assert {float(state["step"]) for state in overflow.moments[4]} == {2.0}
    assert (scaling.scale, scaling.skipped) == (2.0**14, 2)


def test_an_overflow_without_any_scaling_ends_the_run(train):
    with pytest.raises(UserError, match="training has diverged; lower optimizer.lr"):
        train(1, Overflow(0), plugins=[LossScaling(1.0, NEVER)])


def test_small_gradients_survive_in_fp16():
    """Against float64: the gradient of operands that are rounded to FP16, to their rounding."""
    g = torch.Generator().manual_seed(0)
    x_NI, dy_NO = torch.randn(16, 8, generator=g), 1e-9 * torch.randn(16, 4, generator=g)
    found = {}
    for scale in (1.0, 2.0**16):
        layer = fp16_layer(torch.randn(4, 8, generator=g.manual_seed(1)))
        optimizer, scaler = torch.optim.SGD([layer.weight]), LossScaling(scale, NEVER).scaler
        scaler.scale((layer(x_NI) * dy_NO).sum()).backward()
        scaler.unscale_(optimizer)
        found[scale] = layer.weight.grad.double()
    assert not found[1.0].any()
    expected = dy_NO.double().T @ x_NI.double()
    bound = dy_NO.double().abs().T @ x_NI.double().abs() * 2.0**-9  # 2^-11 each, subnormals 2^-10
    assert ((found[2.0**16] - expected).abs() <= bound).all()


def fp16_layer(weight_OI):
    model = torch.nn.Module()
    linear = torch.nn.Linear(*weight_OI.T.shape, bias=False)
    linear.weight.data.copy_(weight_OI)
    model.layers = torch.nn.ModuleList([linear])
    plan = PrecisionPlan()
    FP16().declare(plan)
    plan.commit(model)
    return model.layers[0]


def test_the_noise_scale_sees_unscaled_gradients_and_leaves_overflows_out(train, recorder):
    def noise():
        found = [m for _, m in recorder.records if "train/gradient_noise/noise" in m]
        recorder.records.clear()
        return found

    train(3, GradientNoiseScale(), micro_batches=2)
    plain = noise()
    train(3, GradientNoiseScale(), micro_batches=2, plugins=[LossScaling(2.0**16, 1)])
    for metrics, expected in zip(noise(), plain, strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5)
    train(3, Overflow(1), GradientNoiseScale(), micro_batches=2, plugins=[LossScaling(4.0, NEVER)])
    left = noise()
    assert len(left) == 2
    assert all(abs(value) < 1e6 for metrics in left for value in metrics.values())


@pytest.mark.parametrize("scale", [0.5, 3.0, 0.0, -2.0, float("inf"), float("nan")])
def test_a_scale_that_would_round_is_refused(scale):
    with pytest.raises(ValueError, match="initial_scale must be a power of two, 1 or larger"):
        LossScaling(scale, 400)


def test_an_interval_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="growth_interval must be at least 1, got 0"):
        LossScaling(2.0, 0)
