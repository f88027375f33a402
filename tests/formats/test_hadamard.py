"""The random Hadamard transform against a matrix in float64."""

import pytest
import torch

from lightning_qrl.formats import get_format
from lightning_qrl.formats.hadamard import rotate, rotate_back

SIZES = [16, 32]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(size: int) -> torch.Tensor:
    """What `rotate` multiplies each of K neighbours with, float64 [K, K]."""
    return rotate(torch.eye(size), size).double()


@pytest.mark.parametrize("size", SIZES)
def test_it_is_a_hadamard_matrix_with_signs(size: int):
    rotation = matrix(size)
    torch.testing.assert_close(rotation.abs(), torch.full_like(rotation, size**-0.5))
    torch.testing.assert_close(rotation @ rotation.t(), torch.eye(size).double())
    signs = rotation[:, 0].sign()  # Sylvester's first column is all ones
    assert set(signs.tolist()) == {1.0, -1.0}
    sylvester = torch.ones(1, 1, dtype=torch.float64)
    while len(sylvester) < size:
        sylvester = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), sylvester)
    torch.testing.assert_close(signs[:, None] * sylvester / size**0.5, rotation)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [16, 20, 64, 96])
def test_it_turns_each_k_neighbours_and_back(size: int, length: int):
    x = normal(3, 5, length)
    turned = rotate(x, size)
    whole = -(-length // size) * size
    assert turned.shape == (3, 5, whole)
    padded = torch.nn.functional.pad(x, (0, whole - length)).double()
    expected = (padded.view(3, 5, -1, size) @ matrix(size)).view(3, 5, whole)
    torch.testing.assert_close(turned.double(), expected, rtol=0.0, atol=2e-6)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotate_back(turned, size, length), x, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("size", SIZES)
def test_it_cancels_where_both_operands_of_a_product_are_rotated(size: int):
    x, w = normal(24, 100, seed=1), normal(40, 100, seed=2)
    product = rotate(x, size).double() @ rotate(w, size).double().t()
    torch.testing.assert_close(product, x.double() @ w.double().t(), rtol=0.0, atol=2e-5)


@pytest.mark.parametrize("size", SIZES)
def test_the_values_of_two_rotated_formats_multiply_as_their_products_do(size: int):
    x, w = normal(24, 100, seed=1), normal(40, 100, seed=2)
    a = get_format("nvfp4", hadamard=size, outer_scale="row").scaled(x)
    b = get_format("mxfp8", hadamard=size).scaled(w)
    rotated = (a.values * a.outer).double() @ b.values.double().t()
    turned_back = a.product().double() @ b.product().double().t()
    torch.testing.assert_close(rotated, turned_back, rtol=0.0, atol=1e-4)
    plain = a.unrotated()
    assert plain.rotation == "none"
    assert plain.values.shape == x.shape


@pytest.mark.parametrize("size", SIZES)
def test_a_row_depends_on_no_other_row(size: int):
    x = normal(37, 50)
    for i in (0, 17, 36):
        assert torch.equal(rotate(x, size)[i], rotate(x[i], size))
        assert torch.equal(
            rotate_back(rotate(x, size), size, 50)[i],
            rotate(x[i], size)[:0].new_tensor(
                rotate_back(rotate(x[i : i + 1], size), size, 50)[0].tolist()
            ),
        )


def test_none_is_the_identity():
    x = normal(3, 7)
    assert rotate(x, "none") is x
    assert torch.equal(rotate_back(x, "none", 5), x[:, :5])


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4"])
def test_it_spreads_an_outlier(name: str):
    x = normal(64, 128)
    x[:, ::32] *= 30
    turned, plain = get_format(name, hadamard=16), get_format(name)
    small = x.abs() < 3

    def error(y: torch.Tensor) -> torch.Tensor:
        return (y - x)[small].square().mean()

    assert turned.fake_quantize(x).shape == x.shape
    assert error(turned.fake_quantize(x)) != error(plain.fake_quantize(x))
    flatter = rotate(x, 16).view(-1, 16)
    kurtosis = [(v**4).mean() / (v**2).mean() ** 2 for v in (x.view(-1, 16), flatter)]
    assert kurtosis[1] < kurtosis[0] / 2


def test_a_nan_reaches_what_it_is_rotated_with():
    x = normal(2, 96)
    x[1, 40] = float("nan")
    assert rotate(x, 16).isnan().nonzero()[:, 1].tolist() == list(range(32, 48))
