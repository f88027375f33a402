"""Learning curves against known parameters, scipy's fit, and the rate at which intervals hold."""

import math

import numpy as np
import pytest
from scipy.optimize import curve_fit

from lightning_qrl.analysis.scaling import SigmoidFit, extrapolate, fit_sigmoid
from lightning_qrl.analysis.series import Series, series_from_csv
from lightning_qrl.errors import UserError

R0, A, B, C_MID = 0.1, 0.65, 1.6, 800.0
COMPUTE = np.linspace(0, 5000, 41)


def curve(compute, a=A, b=B, c_mid=C_MID, r0=R0):
    """ScaleRL's equation 1 as it is written."""
    with np.errstate(divide="ignore"):
        return r0 + (a - r0) / (1 + (c_mid / np.asarray(compute, float)) ** b)


def slow_noise(rng: np.random.Generator, size: int, rho: float, std: float) -> np.ndarray:
    """Stationary, with a correlation of rho between neighbours."""
    noise = rng.standard_normal(size)
    for t in range(1, size):
        noise[t] = rho * noise[t - 1] + math.sqrt(1 - rho**2) * noise[t]
    return std * noise


def noisy(rng: np.random.Generator, rho: float = 0.0, std: float = 0.02, **parameters) -> Series:
    return Series(COMPUTE, curve(COMPUTE, **parameters) + slow_noise(rng, COMPUTE.size, rho, std))


def contains(estimate, truth: float) -> bool:
    return estimate.low <= truth <= estimate.high


# --- the fit ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "c_mid"),
    [(0.65, 1.6, 800), (0.65, 0.5, 3000), (1.0, 3.0, 1500), (0.3, 1.0, 20_000), (-0.5, 2.0, 700)],
)
def test_a_curve_without_noise_gives_its_parameters(a, b, c_mid):
    fit = fit_sigmoid(Series(COMPUTE, curve(COMPUTE, a, b, c_mid)))
    found = (fit.r0, fit.a.value, fit.b.value, fit.c_mid.value)
    assert found == pytest.approx((R0, a, b, c_mid), rel=1e-6)
    assert fit.identified
    assert contains(fit.predict(1e4), fit.predict(1e4).value)
    assert fit.predict(1e4).value == pytest.approx(curve(1e4, a, b, c_mid), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_the_fit_is_that_of_scipy(seed):
    series = noisy(np.random.default_rng(seed))
    fit = fit_sigmoid(series, r0=R0)

    def logarithmic(compute, a, log_b, log_mid):
        return curve(compute, a, np.exp(log_b), np.exp(log_mid))

    start = (A, math.log(B), math.log(C_MID))
    best, _ = curve_fit(logarithmic, series.x, series.y, start, xtol=1e-12, ftol=1e-12)
    found = (fit.a.value, math.log(fit.b.value), math.log(fit.c_mid.value))
    assert found == pytest.approx(best, rel=1e-5)
    error = series.y[1:] - logarithmic(series.x[1:], *best)
    assert fit.residual_std == pytest.approx(math.sqrt(error @ error / (error.size - 3)), rel=1e-6)


def test_what_came_before_min_compute_is_not_fitted():
    y = curve(COMPUTE)
    y[(COMPUTE > 0) & (COMPUTE < 600)] = 5.0
    fit = fit_sigmoid(Series(COMPUTE, y), min_compute=600)
    assert fit.a.value == pytest.approx(A, rel=1e-6)
    assert fit.r0 == R0
    assert fit.points == np.sum(COMPUTE >= 600)


def test_seeds_of_one_curve_agree_and_may_be_measured_elsewhere():
    other = np.geomspace(30, 9000, 25)
    fit = fit_sigmoid([Series(COMPUTE, curve(COMPUTE)), Series(other, curve(other))], r0=R0)
    assert (fit.seeds, fit.points) == (2, 40 + 25)
    for estimate, truth in ((fit.a, A), (fit.b, B), (fit.c_mid, C_MID)):
        assert [estimate.low, estimate.high] == pytest.approx([truth, truth], rel=1e-6)


def test_a_fit_repeats_itself_and_can_be_printed():
    series = noisy(np.random.default_rng(0))
    first, again, other = (fit_sigmoid(series, seed=seed) for seed in (0, 0, 1))
    assert first.a == again.a != other.a
    assert str(first).splitlines()[0] == f"A     {first.a}"


# --- intervals ----------------------------------------------------------------------------------


def coverage(fits: list[SigmoidFit]) -> list[float]:
    """How often A, B, C_mid and a reward twice as far out lie in their intervals."""
    held = [
        [
            contains(fit.a, A),
            contains(fit.b, B),
            contains(fit.c_mid, C_MID),
            contains(fit.predict(10_000), curve(10_000)),
        ]
        for fit in fits
    ]
    return np.mean(held, axis=0).tolist()


def of_one_seed(count: int, rho: float, r0: float | None) -> list[SigmoidFit]:
    rng = np.random.default_rng(1)
    return [fit_sigmoid(noisy(rng, rho), r0=r0) for _ in range(count)]


def of_seeds(count: int, seeds: int) -> list[SigmoidFit]:
    """Seeds differ in A and C_mid, on top of their noise."""
    rng = np.random.default_rng(2)

    def trained() -> Series:
        spread = rng.standard_normal(2)
        return noisy(rng, 0.5, a=A + 0.02 * spread[0], c_mid=C_MID * math.exp(0.1 * spread[1]))

    return [fit_sigmoid([trained() for _ in range(seeds)], r0=R0) for _ in range(count)]


# 95% of 30 is 28.5; fewer than 24 has a chance of about 1 in 1000 even at 92%.
@pytest.mark.slow
def test_intervals_of_one_seed_hold_the_truth_at_about_their_rate():
    assert min(coverage(of_one_seed(30, rho=0.5, r0=R0))) >= 0.8


def test_intervals_over_seeds_hold_the_truth_at_about_their_rate():
    assert min(coverage(of_seeds(30, seeds=4))) >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize(("rho", "r0"), [(0.0, R0), (0.5, R0), (0.8, R0), (0.5, None)])
def test_coverage_of_one_seed(rho, r0):
    found = coverage(of_one_seed(300, rho, r0))
    print(f"rho {rho}, r0 {r0}: {found}")
    assert min(found) >= 0.88


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3, 5, 8])
def test_coverage_over_seeds(seeds):
    found = coverage(of_seeds(300, seeds))
    print(f"{seeds} seeds: {found}")
    assert min(found) >= 0.88


def test_slow_noise_widens_the_interval():
    compute = np.linspace(0, 5000, 201)
    width, found = [], []
    for rho in (0.0, 0.8):
        noise = slow_noise(np.random.default_rng(0), compute.size, rho, 0.02)
        fit = fit_sigmoid(Series(compute, curve(compute) + noise), r0=R0)
        width.append(fit.a.high - fit.a.low)
        found.append(fit.autocorrelation)
    assert found == pytest.approx([0.0, 0.8], abs=0.15)
    assert width[1] > 2 * width[0]  # 3 times, were 200 points many


# --- curves that do not say ---------------------------------------------------------------------


def test_a_curve_that_has_not_bent_has_no_ceiling():
    rng = np.random.default_rng(0)
    linear = 0.1 + 1e-4 * COMPUTE
    for y in (linear, linear + 0.02 * rng.standard_normal(COMPUTE.size)):
        fit = fit_sigmoid(Series(COMPUTE, y), r0=0.1)
        assert not fit.identified
        assert fit.a.high == fit.c_mid.high == math.inf
        assert "A is not identified: the curve has not bent by compute 5000" in fit.problems[0]
        assert fit.predict(1e6).high == math.inf
        assert math.isnan(fit.predict(1e6).value)
    assert contains(fit.predict(5000), 0.6)  # inside the data it still says what it knows
    assert contains(fit.predict(10_000), 1.1)


def test_a_flat_curve_says_nothing_of_its_parameters():
    rng = np.random.default_rng(0)
    for std in (0.0, 0.02):
        fit = fit_sigmoid(Series(COMPUTE, 0.3 + std * rng.standard_normal(COMPUTE.size)), r0=0.3)
        assert fit.problems == (
            "A, B and C_mid are not identified: the reward moved no more than its noise",
        )
        assert all(math.isnan(x.value) for x in (fit.a, fit.b, fit.c_mid))
        assert contains(fit.predict(2500), 0.3)


def test_a_falling_curve_has_its_ceiling_below():
    fit = fit_sigmoid(noisy(np.random.default_rng(0), r0=0.6, a=0.2), r0=0.6)
    assert contains(fit.a, 0.2)
    assert fit.a.high < 0.6
    fit = fit_sigmoid(Series(COMPUTE, 0.6 - 1e-4 * COMPUTE), r0=0.6)
    assert fit.a.low == -math.inf
    assert "at most" in fit.problems[0]


def test_a_straight_line_bounds_its_ceiling_by_where_it_has_got_to():
    x, falling = np.arange(40), np.linspace(0.9, 0.1, 40)
    down, up = fit_sigmoid(Series(x, falling)), fit_sigmoid(Series(x, 1 - falling))
    assert (down.a.low, up.a.high) == (-math.inf, math.inf)
    assert down.a.high == pytest.approx(0.1, abs=0.05)
    assert up.a.low == pytest.approx(0.9, abs=0.05)
    assert f"any A of at most {down.a.high:.4g} fits" in down.problems[0]
    assert f"any A of at least {up.a.low:.4g} fits" in up.problems[0]


def test_a_jump_has_no_steepness():
    fit = fit_sigmoid(Series(COMPUTE, np.where(COMPUTE > 2000, 0.8, 0.1)), r0=0.1)
    assert fit.b.high == math.inf
    assert fit.a.value == pytest.approx(0.8, abs=0.02)
    assert any(problem.startswith("B is not identified") for problem in fit.problems)


def test_a_curve_that_was_up_at_once_does_not_say_when():
    fit = fit_sigmoid(Series(COMPUTE, np.where(COMPUTE > 0, 0.8, 0.1)))
    assert fit.c_mid.low == 0
    assert any(problem.startswith("C_mid is not identified") for problem in fit.problems)


# --- extrapolation ------------------------------------------------------------------------------


def test_the_rest_of_a_curve_is_predicted_from_its_first_part():
    series = noisy(np.random.default_rng(3))
    found = extrapolate(series, fraction=0.6, r0=R0)
    late = series.x > 3000
    assert (found.split, found.fit.points) == (3000, 24)
    assert found.observed == pytest.approx(series.y[late].mean())
    assert contains(found.predicted, curve(series.x[late]).mean())
    assert found.rmse == pytest.approx(0.02, rel=0.5)
    assert found.held
    broken = np.where(late, 0.2, series.y)  # it collapses where nobody looked
    assert not extrapolate(Series(COMPUTE, broken), fraction=0.6, r0=R0).held


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1, 2])
def test_a_fraction_leaves_something_on_both_sides(fraction):
    with pytest.raises(UserError, match="between 0 and 1"):
        extrapolate(Series(COMPUTE, curve(COMPUTE)), fraction=fraction)


# --- bad input ----------------------------------------------------------------------------------


def test_too_few_points_are_refused():
    with pytest.raises(UserError, match="3 values of compute above 0; a sigmoid needs more than 3"):
        fit_sigmoid(Series([0, 1, 2, 3, 3], [0, 0.1, 0.2, 0.3, 0.4]))
    with pytest.raises(UserError, match="values of compute above 4900"):
        fit_sigmoid(Series(COMPUTE, curve(COMPUTE)), min_compute=4900)
    with pytest.raises(UserError, match="no curves: 0 values"):
        fit_sigmoid([])
    early = Series([1, 2], [0.1, 0.2], "seed 1")
    with pytest.raises(UserError, match="seed 1: has no values at or above compute 10"):
        fit_sigmoid([Series(COMPUTE, curve(COMPUTE)), early], min_compute=10)


def test_a_series_is_ordered_the_last_of_a_step_counts_and_nan_is_left_out():
    series = Series([3, 1, 2, 3, 4], [0.3, 0.1, np.nan, 0.35, 0.4])
    assert series.x.tolist() == [1, 3, 4]
    assert series.y.tolist() == [0.1, 0.35, 0.4]
    assert series.scaled(32).x.tolist() == [32, 96, 128]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([1, 2], [1], "two lists of one length"),
        ([[1, 2]], [[1, 2]], "two lists of one length"),
        ([-1, 2], [1, 2], "not negative"),
        ([np.nan, 2], [1, 2], "finite"),
        ([1, 2], [1, np.inf], "infinite at x = 2"),
        ([1, 2], [np.nan, np.nan], "no values"),
        ([], [], "no values"),
    ],
)
def test_a_series_that_cannot_be_used(x, y, message):
    with pytest.raises(UserError, match=f"mine: .*{message}"):
        Series(x, y, "mine")


# --- CSV ----------------------------------------------------------------------------------------


def write(folder, text: str) -> str:
    file = folder / "curve.csv"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_a_csv_gives_its_columns(tmp_path):
    path = write(tmp_path, '\ufeff"step",reward,kl\n1,0.1,9\n3,,9\n2,0.2,9\n4,nan,9\n2,0.25,9\n')
    series = series_from_csv(path, x="step", y="reward")
    assert series.x.tolist() == [1, 2]
    assert series.y.tolist() == [0.1, 0.25]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step,reward\n1,2\n", r"no column 'loss'; its columns are step, reward"),
        ("", r"no column 'step'; its columns are none: the file is empty"),
        ("step,loss\n1,0.5\n2,high\n", r"line 3: column 'loss': 'high' is no number"),
        ("step,loss\n1\n", r"loss: has no values"),
    ],
)
def test_a_csv_that_cannot_be_used(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=message) as caught:
        series_from_csv(path, x="step", y="loss")
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"none\.csv: cannot be read as CSV: No such file"):
        series_from_csv(tmp_path / "none.csv", x="step", y="loss")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00step")
    with pytest.raises(UserError, match=r"binary\.csv: cannot be read as CSV"):
        series_from_csv(tmp_path / "binary.csv", x="step", y="loss")
