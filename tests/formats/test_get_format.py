"""Formats by name: what is found, what is shown, what is refused."""

import subprocess
import sys

import pytest

from lightning_qrl.formats import format_names, get_format


def test_names():
    assert format_names() == sorted(format_names())
    assert {"bf16", "fp8_e4m3", "mxfp8", "nvfp4"} <= set(format_names())


def test_options_are_fields():
    fmt = get_format("nvfp4", outer_scale="row", four_over_six="mae")
    assert str(fmt) == "nvfp4(outer_scale=row, four_over_six=mae)"
    assert str(get_format("nvfp4", outer_scale="tensor")) == "nvfp4"
    assert fmt == get_format("nvfp4", four_over_six="mae", outer_scale="row")
    assert len({fmt, get_format("nvfp4"), get_format("nvfp4", outer_scale="row")}) == 3


@pytest.mark.parametrize(
    ("name", "bits"), [("bf16", 16), ("fp8_e4m3", 8), ("mxfp8", 8.25), ("nvfp4", 4.5)]
)
def test_bits(name: str, bits: float):
    assert get_format(name).bits == bits


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("nvpf4", {}, ["'nvpf4'", "did you mean 'nvfp4'", "bf16, fp8_e4m3"]),
        ("nvfp4", {"outer_scael": "row"}, ["nvfp4", "'outer_scael'", "'outer_scale'?"]),
        ("nvfp4", {"outer_scale": "rows"}, ["nvfp4", "outer_scale='rows'", "'row'?", "tensor"]),
        ("nvfp4", {"four_over_six": None}, ["four_over_six=None", "none, mae, mse"]),
        ("mxfp8", {"scale_rule": ["floor"]}, ["mxfp8", "scale_rule=", "floor, ceil, rceil, even"]),
        ("bf16", {"outer_scale": "row"}, ["bf16", "'outer_scale'", "it has none"]),
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
