"""FP16: what it declares and refuses, overflows from FP16 itself, resume, metrics."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks.fp16 import FP16
from callbacks.gradient_noise_scale import GradientNoiseScale
from lightning_qrl.build import build
from lightning_qrl.errors import UserError
from lightning_qrl.formats import get_format
from lightning_qrl.launch import check, rehearse
from lightning_qrl.precision import LinearPrecision
from lightning_qrl.recipe import load_recipe

HALF = get_format("fp16")
HUGE = 2.0**20  # some gradient times this does not fit into FP16


class Weaken(L.Callback):
    """Makes the gradient 2^-26 times as large."""

    def on_before_backward(self, trainer, pl_module, loss):
        loss.register_hook(lambda gradient: gradient * 2.0**-26)


def scaling(recorder):
    names = ("train/loss_scale", "train/skipped_steps")
    return [tuple(m[n] for n in names) for _, m in recorder.records if names[0] in m]


def test_it_computes_the_layers_of_bf16_yaml_in_fp16():
    rows, others = (rehearse(build(load_recipe(name))).table() for name in ("fp16", "bf16"))
    expected = LinearPrecision(HALF, HALF, HALF, "quantized")
    for row, other in zip(rows, others, strict=True):
        assert row.train == row.rollout == (other.train and expected)
    assert sum(row.train is not None for row in rows) == 56


def test_the_gradient_is_that_of_operands_rounded_to_fp16(train):
    """dX = h(dY) h(W), dW = h(dY)^T h(X), against float64, with values that overflow."""
    layer = train(0, FP16()).model.model.layers[0].mlp.up_proj
    g = torch.Generator().manual_seed(0)
    x_NI = torch.randn(5, layer.in_features, generator=g).requires_grad_()
    dy_NO = 1e-6 * torch.randn(5, layer.out_features, generator=g)
    layer(x_NI).backward(dy_NO)
    dy, x, w = (t.detach().half().double() for t in (dy_NO, x_NI, layer.weight))
    torch.testing.assert_close(x_NI.grad.double(), dy @ w, rtol=1e-5, atol=1e-11)
    torch.testing.assert_close(layer.weight.grad.double(), dy.T @ x, rtol=1e-5, atol=1e-11)
    layer(x_NI).backward(1e5 * torch.ones_like(dy_NO))  # beyond 65504
    assert not layer.weight.grad.isfinite().any()


def test_a_scale_too_large_is_halved_until_gradients_fit(train, recorder):
    """By FP16 alone; meanwhile nothing changes, and then it trains."""
    module = train(12, FP16(initial_scale=HUGE))
    start = module.policy.build().state_dict()
    values = scaling(recorder)
    finite = [step["train/grad_norm"] < torch.inf for step in recorder.steps]
    skipped = [finite[:n].count(False) for n in range(1, 13)]
    assert values == [(HUGE / 2**n, n) for n in skipped]
    assert 3 < skipped[-1] < 12
    assert not any(finite[:3])
    assert not any(p.equal(start[n]) for n, p in module.model.state_dict().items())


def test_the_scale_saves_the_gradient_that_fp16_loses(train, recorder):
    """Its norm is that of FP32 to FP16's rounding; of a loss 2^-26 times as large too."""

    def norm(*callbacks):
        recorder.records.clear()
        train(1, *callbacks, Weaken())
        return recorder.steps[0]["train/grad_norm"]

    exact = norm()
    assert norm(FP16(initial_scale=2.0**26)) == pytest.approx(exact, rel=1e-2)
    assert norm(FP16(initial_scale=1.0)) < 0.9 * exact


def test_a_resumed_run_goes_on_with_scale_streak_and_count(train, recorder, tmp_path):
    every = ModelCheckpoint(tmp_path, "{step}", every_n_epochs=1, save_top_k=-1)
    options = {"initial_scale": HUGE, "growth_interval": 2}
    whole = train(12, FP16(**options), every).state_dict()
    values = scaling(recorder)
    ups = [b[0] > a[0] for a, b in zip(values, values[1:], strict=False)]
    assert any(ups), "the scale never grew"
    at = ups.index(True) + 1  # one finite step into a streak
    recorder.records.clear()
    resumed = train(12, FP16(**options), ckpt_path=tmp_path / f"step={at}.ckpt").state_dict()
    assert scaling(recorder) == values[at:]
    assert all(whole[name].equal(resumed[name]) for name in whole)


def test_a_checkpoint_fits_with_and_without_it(train, tmp_path):
    every = ModelCheckpoint(tmp_path, "{step}", every_n_epochs=1, save_top_k=-1)
    plain = train(1, every)
    scaled = train(2, FP16(), every, ckpt_path=tmp_path / "step=1.ckpt")
    assert scaled.state_dict().keys() == plain.state_dict().keys()
    train(3, ckpt_path=tmp_path / "step=2.ckpt")


def test_the_order_of_callbacks_does_not_matter(train, recorder):
    found = []
    for flip in (1, -1):
        recorder.records.clear()
        train(2, *[FP16(initial_scale=16.0), GradientNoiseScale()][::flip], micro_batches=2)
        found.append([m for _, m in recorder.records if "train/gradient_noise/noise" in m])
    assert len(found[0]) == 2
    assert found[0] == found[1]


# --- refusals, when the recipe is read ----------------------------------------------------------

FORWARD = "callbacks.forward_quantization={format: %s}"
TAIL = "callbacks.bf16_tail={fraction: 0.15}"
SENSITIVE = "callbacks.sensitive_weights={select: ['*.v_proj']}"
BACKWARD = "callbacks.quantized_backward={format: nvfp4}"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.precision=bf16-mixed"], "fp16: emulates FP16 .*bf16-mixed.* to 32-true"),
        (["trainer.precision=16-mixed"], "fp16: emulates FP16 .*16-mixed.* to 32-true"),
        ([FORWARD % "nvfp4"], "forward_quantization and fp16 disagree|fp16 and forward_quanti"),
        ([BACKWARD], "fp16 and quantized_backward disagree on the gradient"),
        (["callbacks.dequantized_backward={}"], "fp16 disagree on the backward"),
        ([TAIL], "bf16_tail keeps .*layers.7.* in bf16, and fp16 asks for fp16; remove one"),
        ([SENSITIVE], "sensitive_weights keeps .* in bf16, and fp16 asks for fp16; remove one"),
        (["callbacks.fp16.initial_scale=3"], "must be a power of two"),
        (["callbacks.fp16.where=mpl"], "fp16: selector 'mpl' matches no linear layer"),
    ],
)
def test_what_contradicts_it_is_refused_before_anything_is_written(
    overrides, says, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=says) as error:
        check(load_recipe("fp16", overrides))
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["torchao", "transformer_engine"])
@pytest.mark.parametrize("without", [[], ["fp16"]])
def test_a_backend_that_computes_in_bf16_is_refused(backend, without):
    given = f"callbacks.forward_quantization={{format: fp16, backend: {backend}}}"
    says = f"{backend} cannot compute it: it multiplies 16-bit operands in BF16, .* no FP16 value"
    with pytest.raises(UserError, match=says):
        rehearse(build(load_recipe("fp16", [given], without)))


def test_layers_apart_do_not_contradict():
    given = ["callbacks.fp16.where=attention", FORWARD % "nvfp4, where: mlp", TAIL]
    with pytest.raises(UserError, match="bf16_tail keeps .*self_attn"):
        rehearse(build(load_recipe("fp16", given)))
    assert rehearse(build(load_recipe("fp16", given[:2]))).count_quantized() == 24
