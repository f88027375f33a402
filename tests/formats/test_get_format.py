"""Formats by name: what is found, what is shown, what is refused."""

import subprocess
import sys

import pytest

from lightning_qrl.formats import format_names, get_format


def test_names():
    assert format_names() == sorted(format_names())
    names = "bf16 fp16 fp8_e4m3 fp8_e5m2 mxfp8 mxfp8_e5m2 mxfp6_e3m2 mxfp6_e2m3 mxfp4 nvfp4"
    assert {*names.split(), "int8", "int4", "int3", "int2"} == set(format_names())


@pytest.mark.parametrize(("alias", "name"), [("e4m3", "fp8_e4m3"), ("e5m2", "fp8_e5m2")])
def test_fp8_is_a_small_float(alias: str, name: str):
    assert get_format(alias, outer_scale="row") == get_format(name, outer_scale="row")
    assert get_format(alias).name == name


@pytest.mark.parametrize("name", ["e8m1", "e0m3", "e4m7", "fp8_e2m1", "e4m4", "e2m1x"])
def test_no_such_float(name: str):
    with pytest.raises(ValueError, match="8 bits"):
        get_format(name)


def test_options_are_fields():
    fmt = get_format("nvfp4", outer_scale="row", four_over_six="mae")
    assert str(fmt) == "nvfp4(outer_scale=row, four_over_six=mae)"
    assert str(get_format("nvfp4", outer_scale="tensor")) == "nvfp4"
    assert fmt == get_format("nvfp4", four_over_six="mae", outer_scale="row")
    assert len({fmt, get_format("nvfp4"), get_format("nvfp4", outer_scale="row")}) == 3


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("bf16", 16),
        ("fp8_e4m3", 8),
        ("e3m2", 6),
        ("mxfp8", 8.25),
        ("mxfp6_e2m3", 6.25),
        ("mxfp4", 4.25),
        ("nvfp4", 4.5),
        ("int3", 3),
    ],
)
def test_bits(name: str, bits: float):
    assert get_format(name).bits == bits


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("nvpf4", {}, ["'nvpf4'", "did you mean 'nvfp4'", "bf16, fp16, fp8_e4m3"]),
        ("nvfp4", {"outer_scael": "row"}, ["nvfp4", "'outer_scael'", "'outer_scale'?"]),
        ("nvfp4", {"outer_scale": "rows"}, ["nvfp4", "outer_scale='rows'", "'row'?", "tensor"]),
        ("nvfp4", {"four_over_six": None}, ["four_over_six=None", "none, mae, mse"]),
        ("mxfp8", {"scale_rule": ["floor"]}, ["mxfp8", "scale_rule=", "floor, ceil, rceil, even"]),
        ("bf16", {"outer_scale": "row"}, ["bf16", "'outer_scale'", "it has none"]),
        ("e3m2", {"exponent_bits": 4}, ["e3m2", "'exponent_bits'", "outer_scale"]),
        ("nvfp4", {"block": (1, 32)}, ["nvfp4", "block=(1, 32)", "[1, 16] or [16, 16]"]),
        ("nvfp4", {"block": (16, 16), "outer_scale": "row"}, ["block=[16, 16]", "outer_scale=row"]),
        ("nvfp4", {"four_over_six": "mae", "rounding": "stochastic"}, ["rounding=nearest"]),
        ("nvfp4", {"scale_floor": 449.0}, ["scale_floor=449.0", "0 to 448"]),
        ("mxfp4", {"hadamard": 64}, ["mxfp4", "hadamard=64", "none, 16, 32"]),
        ("int4", {"block": (1, 32)}, ["int4", "outer_scale=row exclude", "outer_scale=none"]),
        ("int4", {"block": (2, 32)}, ["int4", "block=[2, 32]", "[1, N]"]),
    ],
)
def test_refusals_are_one_helpful_line(name: str, options: dict[str, object], expected: list[str]):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the parts are asserted below
        get_format(name, **options)
    message = str(error.value)
    assert "\n" not in message
    for part in expected:
        assert part in message


def test_the_package_needs_no_other_part_of_the_project():
    code = (
        "import sys, lightning_qrl; before = set(sys.modules);"
        "import lightning_qrl.formats as f; f.format_names();"
        "new = set(sys.modules) - before;"
        "own = [m for m in new if m.startswith('lightning') and '.formats' not in m];"
        "import torch; sys.exit(bool(own) or torch.cuda.is_initialized())"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
