"""The live view's drawing: numbers in, lines or a panel out."""

import math
from dataclasses import replace

import pytest
from rich.console import Console

from lightning_qrl.reports.live import BARS, WIDTH, Progress, duration, panel, plain_line, sparkline

METRICS = {
    "train/entropy": 0.51234,
    "train/grad_norm": 3.14159,
    "train/sampling/sampling_logp_difference/mean": 0.000012,
    "train/loss": -0.02,
    "train/tokens_per_second": 12345.6,
}


def progress(rewards=(0.25, 0.5), metrics=METRICS, seconds=75.0):
    return Progress("4bitter-seed0", 2, 80, seconds, rewards, metrics)


def drawn(item, width=100):
    console = Console(force_terminal=True, width=width, color_system=None, record=True)
    with console.capture() as capture:
        console.print(panel(item))
    return capture.get()


def test_a_plain_line_says_all_that_was_measured():
    assert plain_line(progress()) == (
        "step 2/80  reward 0.500  entropy 0.512  grad norm 3.142  |Δlogprob| 1.2e-05  "
        "loss -0.0200  tokens/s 12,346  1m15s left"
    )


def test_a_plain_line_leaves_out_what_was_not():
    line = plain_line(progress((), {"train/loss": 1.0}, None))
    assert line == "step 2/80  loss 1.0000  ? left"


def test_the_panel_shows_the_same_numbers_with_a_bar_and_a_sparkline():
    text = drawn(progress()).replace("\u00a0", " ")
    for part in ("4bitter-seed0", "step 2/80", "1m15s left", "reward 0.500", "▅█", "entropy 0.512",
                 "grad norm 3.142", "|Δlogprob| 1.2e-05", "tokens/s 12,346", "╸"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("width", [20, 40, 80])
def test_the_panel_fits_any_terminal(width):
    lines = drawn(progress(tuple(i / 100 for i in range(100))), width).splitlines()
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_number_stays_with_its_label(width):
    assert "|Δlogprob|\u00a01.2e-05" in drawn(progress(), width)


def test_the_panel_of_a_run_without_rewards():
    assert "reward" not in drawn(progress((), {}))


ODD = {
    "train/frac_reward_zero_std": (0.8, 0.9, "90% of the groups give no gradient"),
    "train/completions/clipped_ratio": (0.3, 0.5, "50% of the completions were cut off"),
    "train/rewards_missing": (0.0, 3.0, "3 completions have no reward"),
    "train/reward_errors": (0.0, 2.0, "the task failed on 2 completions"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_leaves_its_healthy_range_is_explained_in_one_line(name):
    healthy, odd, says = ODD[name]
    assert progress(metrics={name: healthy}).explained() == {}
    item = progress(metrics={name: odd})
    assert item.explained().keys() == {name}
    assert says in item.explained()[name]
    assert "\n" not in item.explained()[name]
    assert says in drawn(item)
    assert says not in plain_line(item)
    assert max(map(len, drawn(item, 40).splitlines())) <= 40


def test_a_loss_that_does_not_learn_from_rewards_is_told_nothing_of_them():
    metrics = {"train/frac_reward_zero_std": 1.0, "train/rewards_missing": 3.0}
    item = replace(progress(metrics=metrics), learns_from_rewards=False)
    assert item.explained() == {}


def test_where_no_reward_is_known_nothing_is_said_of_the_task_being_hard():
    metrics = {
        "train/frac_reward_zero_std": 1.0,
        "train/rewards_missing": 8.0,
        "train/reward_std": 0.0,
    }
    assert progress(metrics=metrics).explained().keys() == {"train/rewards_missing"}


def test_not_a_number_breaks_no_view():
    item = progress((0.5, math.nan), dict.fromkeys([*METRICS, *ODD], math.nan))
    assert item.explained() == {}
    assert "reward nan" in plain_line(item)
    assert "reward nan" in drawn(item)


@pytest.mark.parametrize(
    ("values", "drawing"),
    [
        ([], ""),
        ([0.0], "▁"),
        ([0.7], "█"),
        ([0.5, 0.5, 0.5], "███"),
        ([0.0, 0.0], "▁▁"),
        ([0, 1, 2, 3, 4, 5, 6, 7], BARS),
        ([-1.0, 0.0, 1.0], "▁▄█"),
        ([-1.0, -1.0], "▁▁"),
        ([-2.0, -1.0], "▁▄"),
        ([0.0, math.nan, 1.0], "▁ █"),
        ([math.inf, 1.0], " █"),
        ([math.nan], " "),
    ],
)
def test_sparkline(values, drawing):
    shown = sparkline(values)
    assert len(shown) == len(drawing)
    assert all(a == b or {a, b} <= {"▄", "▅"} for a, b in zip(shown, drawing, strict=True)), shown


@pytest.mark.parametrize("length", [WIDTH - 1, WIDTH, WIDTH + 1, 1000])
def test_a_long_series_is_averaged_down(length):
    shown = sparkline([i / length for i in range(length)])
    assert len(shown) == min(length, WIDTH)
    assert list(shown) == sorted(shown, key=BARS.index)
    assert (shown[0], shown[-1]) == (BARS[0], BARS[-1])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "?"), (0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (3599.4, "59m59s"), (3600, "1h00m"),
     (7322, "2h02m")],
)  # fmt: skip
def test_duration(seconds, text):
    assert duration(seconds) == text
