"""The page of a comparison: what is said on it, and that it stands alone, whatever it is given."""

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pytest
from comparisons import ablation, arm_of, comparison_of

from lightning_qrl.errors import UserError
from lightning_qrl.reports.comparison import Difference
from lightning_qrl.reports.measures import is_spike
from lightning_qrl.reports.page import write_page, write_pngs
from lightning_qrl.reports.page.chart import drawn
from lightning_qrl.reports.page.curves import curves
from lightning_qrl.reports.page.forest import forest
from lightning_qrl.tracking.histories import History

NAME = "<script>alert('x')</script> & $x_1$ \x00 \ud800"
VOID = {"meta", "br", "img", "link", "input", "hr"}
PNG = b"\x89PNG\r\n\x1a\n"


class Page(HTMLParser):
    """What stands in a page; fails where an element is not closed in its place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "title", "desc"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def attributes(self, name: str) -> list[str]:
        return [found[name] for _, found in self.elements if name in found]

    def count(self, tag: str) -> int:
        return sum(one == tag for one, _ in self.elements)


@pytest.fixture
def page(tmp_path):
    """Writes a comparison's page and reads it."""

    def made(comparison):
        charts = write_page(comparison, tmp_path / "page.html")
        return Page((tmp_path / "page.html").read_text()), charts

    return made


def changed(comparison, arm, **given):
    """A comparison with one arm that is another."""
    arms = list(comparison.arms)
    arms[arm] = replace(arms[arm], **given)
    return comparison_of(arms, comparison.notes)


def with_metrics(run, **metrics):
    """A run with some values of its gradient norm (`norm`) or mismatch (`gap`) put in place."""
    names = {"norm": "train/grad_norm", "gap": "train/sampling/sampling_logp_difference/mean"}
    changed = {names[key]: values for key, values in metrics.items()}
    return replace(run, metrics={**run.metrics, **changed})


def norms_of(comparison):
    """The chart of gradient norms, drawn."""
    (chart,) = [chart for chart in curves(comparison) if chart.key == "gradient_norm"]
    return drawn(chart)


def test_the_page_stands_alone_and_is_well_formed(page):
    found, charts = page(ablation(steps=20, seeds=2, arms=4))
    ids = found.attributes("id")
    assert max(Counter(ids).values()) == 1
    links = found.attributes("href") + found.attributes("xlink:href")
    references = [link.removeprefix("#") for link in links]
    references += re.findall(r"url\(#([^)]+)\)", " ".join(found.attributes("clip-path")))
    references += found.attributes("aria-labelledby") + found.attributes("aria-describedby")
    assert references
    assert set(references) <= set(ids)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in found.elements}
    assert not found.attributes("src")
    style = (files("lightning_qrl.reports.page") / "page.css").read_text()
    assert "url(" not in style
    assert "@import" not in style
    assert found.count("svg") == sum(len(one.chart.panels) for one in charts)
    assert found.count("title") == found.count("desc") + 1  # the page has one too
    cells = [attributes for tag, attributes in found.elements if tag == "th"]
    assert all(attributes.get("scope") in ("col", "row") for attributes in cells)


def test_the_same_comparison_gives_the_same_bytes(tmp_path):
    for file in ("a.html", "b.html"):
        write_page(ablation(steps=20, seeds=2, arms=2), tmp_path / file)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_names_and_errors_may_hold_anything(page):
    comparison = ablation(steps=20, seeds=1, arms=2)
    title = "</title><b>"
    odd = replace(changed(comparison, 1, name=NAME, errors={0: "at <b>layer</b>"}), title=title)
    found, charts = page(odd)
    assert "<script>alert('x')</script> & $x_1$ \ufffd \ufffd" in found.text
    assert "at <b>layer</b>" in found.text
    assert found.count("script") == found.count("b") == 0
    assert title in found.text
    assert any("$x_1$" in svg for one in charts for svg in one.svgs)


def test_a_link_is_followed_only_to_a_page(page):
    comparison = ablation(steps=10, seeds=2, arms=2)
    runs = dict(comparison.arms[1].runs)
    runs[0] = replace(runs[0], link="http://localhost:5000/#/runs/1")
    runs[1] = replace(runs[1], link="javascript:alert(1)")
    found, _ = page(changed(comparison, 1, runs=runs))
    links = [attributes["href"] for tag, attributes in found.elements if tag == "a"]
    assert links == ["http://localhost:5000/#/runs/1"]
    assert runs[1].id in found.text


def test_a_large_experiment_is_a_small_page(tmp_path):
    write_page(ablation(steps=500, seeds=5, arms=10), tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 5e6


def test_figures_are_written_as_pngs(page, tmp_path):
    _, charts = page(ablation(steps=20, seeds=2, arms=2))
    written = write_pngs(charts, tmp_path)
    assert [file.name for file in written] == [
        "differences.png",
        "held_out_reward.png",
        "reward.png",
        "gradient_norm.png",
        "mismatch.png",
        "k3_kl.png",
        "entropy.png",
    ]
    assert all(file.read_bytes().startswith(PNG) for file in written)
    with pytest.raises(UserError, match="cannot be written: No such file"):
        write_pngs(charts, tmp_path / "nowhere")


def test_a_page_that_cannot_be_written_is_a_line(tmp_path):
    with pytest.raises(UserError, match="cannot be written: No such file"):
        write_page(ablation(steps=10, seeds=1, arms=2), tmp_path / "nowhere" / "page.html")


def test_every_spike_is_marked():
    comparison = ablation(seeds=2, arms=4)
    chart = norms_of(comparison)
    for arm, svg in zip(comparison.arms, chart.svgs, strict=True):
        norms = [run.metrics["train/grad_norm"] for run in arm.runs.values()]
        marks = re.findall(r"<use [^>]*fill: var\(--paper\)[^>]*var\(--vermilion\)", svg)
        assert len(marks) == sum(is_spike(norm).sum() for norm in norms)
    assert any(is_spike(run.metrics["train/grad_norm"]).any() for run in arm.runs.values())


def test_what_a_log_scale_cannot_show_is_marked_and_explained():
    comparison = ablation(seeds=2, arms=4)
    steps = np.arange(1, 41)
    norms = np.linspace(1, 2, 40)
    norms[5], norms[20:25], norms[30:] = 0.0, np.inf, np.nan
    runs = {s: with_metrics(r, norm=History(steps, norms))
            for s, r in comparison.arms[1].runs.items()}  # fmt: skip
    charts = curves(changed(comparison, 1, runs=runs))
    captions = {chart.key: chart.caption for chart in charts}
    edges = (
        "zero lies on the lower edge; ▲ infinite or beyond the axis; × not a number from here on."
    )
    assert captions["gradient_norm"].endswith(f"Log scale; {edges}")
    assert captions["mismatch"].endswith("Log scale.")


def test_an_arm_whose_rewards_are_infinite_has_marks():
    comparison = ablation(seeds=2, arms=4)
    reward = History(np.arange(10), np.full(10, np.inf))
    runs = {s: replace(r, metrics={**r.metrics, "eval/reward": reward})
            for s, r in comparison.arms[1].runs.items()}  # fmt: skip
    chart = curves(changed(comparison, 1, runs=runs))[0]
    assert chart.key == "held_out_reward"
    assert chart.caption.endswith("▲ infinite or beyond the axis.")
    axes = drawn(chart).figure.axes[1]
    assert "^" in [line.get_marker() for line in axes.lines]


def test_an_arm_that_is_zero_throughout_is_a_line_at_zero():
    comparison = ablation(seeds=2, arms=4)
    zero = History(np.arange(20), np.zeros(20))
    runs = {s: with_metrics(r, gap=zero) for s, r in comparison.arms[1].runs.items()}
    (chart,) = [c for c in curves(changed(comparison, 1, runs=runs)) if c.key == "mismatch"]
    axes = drawn(chart).figure.axes[1]
    heights = [np.asarray(line.get_ydata()) for line in axes.lines if len(line.get_ydata()) == 20]
    assert len(heights) == 3  # of the mean, and of two seeds
    (at,) = {float(y) for line in heights for y in line}
    assert at > axes.get_ylim()[0]


def test_one_diverged_run_does_not_flatten_the_others():
    comparison = ablation(seeds=2, arms=4)
    runs = dict(comparison.arms[1].runs)
    runs[0] = with_metrics(runs[0], norm=History(np.arange(1, 31), np.geomspace(1, 1e30, 30)))
    chart = norms_of(changed(comparison, 1, runs=runs))
    top = chart.figure.axes[0].get_ylim()[1]
    assert 10 < top < 1e5
    assert "beyond the axis" in chart.chart.caption


def test_a_forest_plot_follows_no_arm_that_is_far_beyond_the_others():
    comparison = ablation(steps=20, seeds=2, arms=6)
    differences = {
        (arm.name, key): Difference(2, middle, middle - 0.1, middle + 0.1, 1.0, 1.0, marked=False)
        for key in ("held_out_reward", "mismatch")
        for arm, middle in zip(comparison.arms[1:], (0.1, -0.1, 0.2, 0.0, 1e4), strict=True)
    }
    chart = forest(replace(comparison, differences=differences))
    for axes in drawn(chart).figure.axes:
        low, high = axes.get_xlim()
        assert -1 < low < -0.2
        assert 0.3 < high < 10
        assert ">" in [line.get_marker() for line in axes.lines]


def test_a_ratio_beyond_all_numbers_is_drawn():
    comparison = ablation(steps=20, seeds=2, arms=3)
    far = Difference(2, 1400.0, 1300.0, 1500.0, 1.0, 1.0, marked=False)
    given = {(arm.name, "mismatch"): far for arm in comparison.arms[1:]}
    chart = forest(replace(comparison, differences=given))
    assert drawn(chart).figure.axes[0].get_xlim()[1] == 300


def test_a_quantity_without_a_value_has_no_chart():
    comparison = ablation(steps=20, seeds=2, arms=2)
    zero = History(np.arange(20), np.zeros(20))
    arms = [
        arm_of(arm.name, {s: with_metrics(r, gap=zero) for s, r in arm.runs.items()})
        for arm in comparison.arms
    ]
    keys = [chart.key for chart in curves(comparison_of(arms))]
    assert "mismatch" not in keys
    assert "k3_kl" in keys


def test_arms_without_any_data_make_a_page(page):
    arms = [
        replace(arm_of(arm.name, {s: replace(r, metrics={}) for s, r in arm.runs.items()}),
                errors={0: "out of memory"})
        for arm in ablation(steps=5, seeds=2, arms=2).arms
    ]  # fmt: skip
    found, charts = page(comparison_of(arms))
    assert charts == ()
    assert "out of memory" in found.text
    assert "4 runs · 2 failed" in found.text


def test_a_metric_that_was_asked_for_is_drawn():
    comparison = ablation(steps=20, seeds=2, arms=2)
    asked = replace(comparison.measures[0], key="train/kl/last", label="train/kl, last")
    charts = curves(replace(comparison, measures=(*comparison.measures, asked)))
    assert charts[-1].key == "train_kl"
