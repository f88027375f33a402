"""Gradient noise scale: unbiased on gradients of known mean and covariance, and smoothed."""

import pytest
import torch

from lightning_qrl.analysis.noise_scale import GradientNoise, estimate

STEPS, DIMENSIONS = 4000, 12


def estimates(sizes, mean, deviation):
    """Signal and noise of many steps of independent samples, [STEPS, 2]."""
    samples = sum(sizes)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS, samples, DIMENSIONS, generator=generator, dtype=torch.float64)
    parts = [part.sum(dim=1) / samples for part in (x * deviation + mean).split(sizes, dim=1)]
    whole = sum(parts).square().sum(dim=1)
    apart = sum(part.square().sum(dim=1) for part in parts)
    squares = float(sum(size**2 for size in sizes))
    return torch.tensor(
        [estimate(float(w), float(p), samples, squares) for w, p in zip(whole, apart, strict=True)],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (1, 9), (2, 0, 5, 9)])
def test_both_estimates_are_unbiased(sizes):
    mean = torch.linspace(-0.3, 0.5, DIMENSIONS, dtype=torch.float64)
    deviation = torch.linspace(0.5, 2.0, DIMENSIONS, dtype=torch.float64)
    truth = torch.stack([mean.square().sum(), deviation.square().sum()])
    found = estimates(list(sizes), mean, deviation)
    error = found.std(dim=0) / STEPS**0.5
    assert (error < 0.1 * truth).all()  # sharp enough to see a bias of a third
    assert ((found.mean(dim=0) - truth).abs() < 4 * error).all()


def test_equal_parts_give_the_papers_estimates():
    torch.manual_seed(0)
    parts = torch.randn(4, 7, dtype=torch.float64)  # of 8 samples each, already mean gradients
    small, big = parts.square().sum(dim=1).mean(), parts.mean(dim=0).square().sum()
    signal = (32 * big - 8 * small) / (32 - 8)  # appendix A.1
    noise = (small - big) / (1 / 8 - 1 / 32)
    shares = (parts / 4).square().sum()
    assert estimate(float(big), float(shares), 32, 4 * 8**2) == pytest.approx(
        (float(signal), float(noise))
    )


@pytest.mark.parametrize("sizes", [(), (0, 0), (8,), (0, 8, 0)])
def test_less_than_two_parts_with_samples_say_nothing(sizes):
    assert estimate(1.0, 1.0, sum(sizes), sum(n**2 for n in sizes)) is None


def test_the_average_forgets_and_is_not_drawn_to_its_beginning():
    noise = GradientNoise().updated(2.0, 10.0, 0.9)
    assert (noise.signal, noise.noise, noise.scale) == pytest.approx((2.0, 10.0, 5.0))
    noise = noise.updated(-1.0, 4.0, 0.9)
    assert noise.signal == pytest.approx((0.9 * 2 - 1) / 1.9)
    assert noise.noise == pytest.approx((0.9 * 10 + 4) / 1.9)
    assert noise.scale == pytest.approx((0.9 * 10 + 4) / (0.9 * 2 - 1))


@pytest.mark.parametrize("signal", [0.0, -1.0])
def test_without_signal_there_is_no_scale(signal):
    assert GradientNoise().updated(signal, 1.0, 0.5).scale is None
