"""Which backend computes a layer, and what is said about it."""

import pytest
import torch
from torch import nn

from lightning_qrl.errors import UserError
from lightning_qrl.formats import get_format
from lightning_qrl.precision import LinearPrecision, PrecisionPlan, QuantLinear
from lightning_qrl.precision import backends as package
from lightning_qrl.precision.backends import Choice, check_name, choose, find_chip
from lightning_qrl.precision.backends._agreement import disagreement
from lightning_qrl.precision.backends.base import CPU, Backend, Chip
from lightning_qrl.precision.backends.torchao import ScaledLinear, TorchAO
from lightning_qrl.precision.sides import SideSwitch
from lightning_qrl.reports.plan import plan_columns

AMPERE, HOPPER = Chip("NVIDIA A100", (8, 0)), Chip("NVIDIA H200", (9, 0))
BLACKWELL = Chip("NVIDIA B200", (10, 0))
SHAPE = (64, 64)
FP8, FP8_ROW = get_format("fp8_e4m3"), get_format("fp8_e4m3", outer_scale="row")
FP8_BLOCK = get_format("fp8_e4m3", block=(1, 128), outer_scale="none")
E5M2, NVFP4, MXFP8 = get_format("fp8_e5m2"), get_format("nvfp4"), get_format("mxfp8")


def both(format, backward="dequantized", gradient=None):
    return LinearPrecision(format, format, gradient, backward)


@pytest.fixture
def agreeing(monkeypatch):
    """As on a machine where the agreement tests pass; they run on a GPU alone."""
    monkeypatch.setattr(package, "_disagreement", lambda name, precision: None)


@pytest.mark.parametrize(
    ("precision", "why"),
    [
        (both(FP8), "this CPU has no FP8 units"),
        (both(NVFP4), "this CPU has no NVFP4 units"),
        (both(get_format("int8")), "no unit multiplies int8"),
        (LinearPrecision(NVFP4, None), "an operand of its GEMM is not quantized"),
        (LinearPrecision(FP8, NVFP4), "no unit multiplies nvfp4 with fp8_e4m3"),
    ],
)
def test_auto_emulates_on_a_cpu_and_says_why(precision, why):
    assert choose("auto", precision, SHAPE, CPU) == Choice("emulate", why)


def test_auto_takes_the_units_that_the_chip_has(agreeing):
    assert choose("auto", both(FP8), SHAPE, AMPERE).backend == "emulate"
    assert choose("auto", both(FP8_ROW), SHAPE, HOPPER).backend == "torchao"
    assert "H200" in choose("auto", both(FP8_ROW), SHAPE, HOPPER).why
    assert choose("auto", both(NVFP4), SHAPE, HOPPER) == Choice(
        "emulate", "NVIDIA H200 has no NVFP4 units"
    )
    for format in (NVFP4, MXFP8, get_format("mxfp4")):
        assert choose("auto", both(format), SHAPE, BLACKWELL).backend == "torchao"


def test_auto_passes_over_a_backend_that_disagrees(monkeypatch):
    asked = []

    def off(name, precision):
        asked.append(name)
        return "its Y is off by 3.0%"

    monkeypatch.setattr(package, "_disagreement", off)
    assert choose("auto", both(FP8), SHAPE, HOPPER) == Choice("emulate", "its Y is off by 3.0%")
    assert asked == ["torchao"]  # Transformer Engine is not installed, and so not asked


@pytest.mark.parametrize(
    ("asked", "precision", "chip", "says"),
    [
        ("torchao", both(NVFP4), CPU, "this CPU has no NVFP4 units"),
        ("torchao", both(MXFP8), HOPPER, "NVIDIA H200 has no MXFP8 units"),
        ("torchao", LinearPrecision(FP8, None), CPU, "not quantized"),
        ("torchao", both(FP8, "quantized"), CPU, "not quantized"),  # the gradient
        ("torchao", both(E5M2), CPU, "fp8_e5m2 with itself"),
        ("torchao", both(FP8_BLOCK), HOPPER, "fp8_e4m3 in blocks is not wired"),
        ("torchao", both(FP8, "quantized", FP8_BLOCK), HOPPER, "fp8_e4m3 in blocks is not wired"),
        ("torchao", both(FP8, "quantized", NVFP4), BLACKWELL, "nvfp4 with fp8_e4m3"),
        (
            "torchao",
            LinearPrecision(FP8, get_format("fp8_e4m3", hadamard=16)),
            CPU,
            "would not cancel",
        ),
        ("transformer_engine", both(FP8), CPU, "this CPU has no units"),
        ("transformer_engine", both(FP8_ROW), HOPPER, "outer_scale=row"),
    ],
)
def test_what_cannot_be_done_is_refused(asked, precision, chip, says):
    with pytest.raises(ValueError, match=says):
        choose(asked, precision, SHAPE, chip)


def test_what_was_asked_for_is_taken():
    for precision in (both(FP8), both(FP8_ROW, "quantized", E5M2), LinearPrecision(FP8, E5M2)):
        assert choose("torchao", precision, SHAPE, CPU) == Choice("torchao", "as asked")
    assert choose("emulate", both(FP8), SHAPE, HOPPER) == Choice("emulate", "as asked")


def test_fused_experts_are_emulated():
    fused = (8, 64, 64)
    assert choose("auto", both(FP8), fused, HOPPER) == Choice(
        "emulate", "fused experts are emulated"
    )
    assert choose("emulate", both(FP8), fused, CPU).backend == "emulate"
    with pytest.raises(ValueError, match="fused experts"):
        choose("torchao", both(FP8), fused, CPU)


def test_misspelt_names_are_refused_with_the_nearest():
    check_name("auto")
    with pytest.raises(ValueError, match="torchao"):
        check_name("torchoa")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_the_chip_of_a_machine_without_cuda():
    assert find_chip() == find_chip("cpu") == CPU
    assert find_chip("mps").capability is None
    assert not CPU.at_least((8, 9))


# --- the agreement test -----------------------------------------------------------------------


class Wrong(ScaledLinear):
    """Multiplies with a weight that is 1% too large."""

    def multiplier(self, precision):
        multiply = super().multiplier(precision)
        return lambda a, b, dtype: 1.01 * multiply(a, b, dtype)


class Broken(ScaledLinear):
    """Has no kernel for this."""

    def forward(self, input):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED\nand more")


def backend_of(kind):
    class Some(TorchAO):
        def layer(self) -> type[QuantLinear]:
            return kind

    return Some()


AGREEING = [
    *(both(format, backward) for format in (FP8, FP8_ROW) for backward in ("high_precision",)),
    LinearPrecision(FP8, FP8_ROW, backward="dequantized"),
    both(FP8_ROW, "quantized", E5M2),
    both(FP8, "quantized", get_format("fp8_e5m2", rounding="stochastic")),
]


@pytest.mark.parametrize("precision", AGREEING, ids=str)
def test_the_scaled_multiply_agrees_and_takes_no_random_number(precision):
    state = torch.get_rng_state()
    assert disagreement(TorchAO(), precision, "cpu") is None
    assert torch.get_rng_state().equal(state)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", AGREEING, ids=str)
def test_the_scaled_multiply_agrees_on_a_gpu(precision):
    assert disagreement(TorchAO(), precision, "cuda") is None


def test_wrong_numbers_and_missing_kernels_disagree():
    precision = both(FP8)
    assert disagreement(backend_of(Wrong), precision, "cpu") == "its Y is off by 1.0%"
    reason = disagreement(backend_of(Broken), precision, "cpu")
    assert reason == "its test failed: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED"


# --- in the plan ------------------------------------------------------------------------------


def plan(llama, *rules, chip=CPU, **more):
    made = PrecisionPlan()
    for rule in rules:
        made.quantize("linears", by="forward", weight=FP8, activation=FP8_ROW, **rule)
    model = llama(layers=1, device="cpu")
    made.commit(model, chip)
    return model, made


def cells(made, layer="model.layers.0.mlp.up_proj"):
    columns = plan_columns(made.table())
    row = columns["layer"].index(layer)
    return columns["backend"][row], columns["why"][row]


def test_the_plan_shows_the_backend_and_why(llama):
    model, made = plan(llama, {"backend": "torchao"})
    assert cells(made) == ("torchao", "as asked")
    assert cells(made, "lm_head") == ("", "")
    assert isinstance(model.model.layers[0].mlp.up_proj, ScaledLinear)
    assert isinstance(model.lm_head, nn.Linear)
    _, made = plan(llama, {})
    assert cells(made) == ("emulate", "this CPU has no FP8 units")


def test_the_sides_may_differ(llama):
    model, made = plan(
        llama,
        {"backend": "torchao", "side": "rollout"},
        {"backend": "emulate", "side": "train"},
    )
    assert cells(made) == ("train emulate, rollout torchao", "as asked")
    ids = torch.arange(6).view(1, 6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        emulated = model(input_ids=ids).logits
        with made.sampling():
            native = model(input_ids=ids).logits
        assert model(input_ids=ids).logits.equal(emulated)
    assert not native.equal(emulated)  # which is rounded twice
    difference = (native.double() - emulated.double()).norm() / emulated.double().norm()
    assert difference < 0.02


def test_a_layer_has_one_native_backend(agreeing, llama, monkeypatch):
    monkeypatch.setattr(
        "lightning_qrl.precision.backends.transformer_engine.find_spec", lambda name: name
    )
    te = {"backend": "transformer_engine", "side": "rollout", "activation": FP8}
    made = PrecisionPlan()
    made.quantize("linears", by="one", side="train", weight=FP8, activation=FP8, backend="torchao")
    made.quantize("linears", by="two", weight=FP8, **te)
    with pytest.raises(UserError, match=r"one and two: .*cannot change between backends"):
        made.commit(llama(layers=1), HOPPER)


@pytest.mark.parametrize("backend", ["torchao", "transformer_engine"])
def test_an_impossible_backend_is_one_line_that_says_what_to_do(llama, backend):
    made = PrecisionPlan()
    made.quantize("linears", by="forward", weight=NVFP4, activation=NVFP4, backend=backend)
    with pytest.raises(UserError) as caught:
        made.commit(llama(layers=1), CPU)
    text = str(caught.value)
    assert text.startswith("forward: model.layers.0.self_attn.q_proj: ")
    assert f"backend {backend} cannot compute it: this CPU has no" in text
    assert text.endswith("set backend to auto or emulate")


def test_kept_layers_are_emulated(llama):
    made = PrecisionPlan()
    made.quantize("linears", by="forward", weight=FP8, activation=FP8, backend="torchao")
    made.keep("*.up_proj", by="tail")
    model = llama(layers=1, device="cpu")
    made.commit(model, CPU)
    assert cells(made) == ("", "")
    assert type(model.model.layers[0].mlp.up_proj) is QuantLinear


def test_every_backend_is_found_by_its_module(llama):
    for name in package.backend_names():
        if name != "auto":
            backend: Backend = package.load(name)
            assert backend.name == name
            assert issubclass(backend.layer(), QuantLinear)


def test_layers_of_another_backend_compute_as_quant_linear():
    from lightning_qrl.precision.backends.transformer_engine import EngineLinear

    torch.manual_seed(0)
    linear, x = nn.Linear(32, 16), torch.randn(5, 32)
    precision = both(FP8)
    expected = QuantLinear.from_linear(linear, precision, precision, SideSwitch())(x)
    for kind in (ScaledLinear, EngineLinear):
        assert kind.from_linear(linear, precision, precision, SideSwitch())(x).equal(expected)
