"""The page in a Chromium: who can read and press it, on which screen."""

import re
from typing import Any

import pytest

from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import PRESETS, Settings
from lightning_qrl.simulator.summary import summarize
from tests.helpers.simulator_page import move, until, wanted

pytestmark = pytest.mark.slow


def test_what_is_drawn_is_also_said(page):
    """Labels of the pictures, the table of steps; and only the outcome is said unasked."""
    page.locator("#steps summary").click()
    for preset in ("bf16", "fp4_naive"):
        page.locator(f"button[data-preset={preset}]").click()
        trace = simulate(Settings(**PRESETS[preset]))
        said = {name: page.locator(f"#{name}").get_attribute("aria-label")
                for name in ("timeline", "mismatch", "drift", "reward", "caps")}  # fmt: skip
        verdict = wanted(trace.settings)["verdict"].replace(" at ", " at step ")
        assert f"{len(trace.rollouts)} rollouts, {trace.discarded} discarded" in said["timeline"]
        assert f"to {trace.final_drift:.3f} in {trace.optimizer_steps} steps" in said["drift"]
        assert said["drift"].endswith(verdict)
        assert f"to {trace.final_reward:.3f} in" in said["reward"]
        assert f"2: {trace.final_reward:.2f}" in said["caps"]
        rows = page.locator("#steps tbody tr").all_text_contents()
        assert len(rows) == trace.optimizer_steps
        assert rows[-1].endswith(f"{trace.final_drift:.2f}{trace.final_reward:.3f}")
    live = page.evaluate("[...document.querySelectorAll('output:not([aria-live=off])')].length")
    assert live == 0


@pytest.mark.parametrize("width", [360, 640, 860, 1000, 1280])
def test_everything_has_room_at_any_width(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    page.locator("button[data-preset=fp4_naive]").click()
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    cut = page.evaluate(
        "() => [...document.querySelectorAll('#outcome dt, #outcome dd[data-outcome]')]"
        ".filter((cell) => cell.scrollWidth > cell.clientWidth).map((cell) => cell.textContent)"
    )
    assert cut == []
    assert too_small(page, 24) == []
    clipped = page.evaluate(
        "() => [...document.querySelectorAll('.copy code')]"
        ".filter((one) => one.scrollWidth > one.clientWidth).length"
    )
    assert clipped == 0


def test_on_a_phone_a_slider_and_its_effect_are_on_one_screen(browser, file):
    context = browser.new_context(
        viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True
    )
    page = context.new_page()
    page.goto(file.as_uri())
    for key in ("max_staleness", "batch", "samplers", "weight_sync"):
        control = page.locator(f"#{key}")
        control.evaluate("one => one.scrollIntoView({ block: 'center' })")
        strip = page.locator("#strip").bounding_box()
        assert 0 <= strip["y"] < strip["y"] + strip["height"] < control.bounding_box()["y"]
        assert strip["y"] + strip["height"] < 200
    drawn = page.locator("#strip path.line").get_attribute("d")
    move(page, "batch", 8)
    assert page.locator("#strip path.line").get_attribute("d") != drawn
    assert too_small(page, 44) == []
    context.close()


def too_small(page: Any, least: int) -> list[str]:
    """What is pressed and is lower than that, of what is seen."""
    return page.evaluate(
        """least => [...document.querySelectorAll('button, select, summary, .choices label, '
            + '.switch label, input[type=range]')].filter((one) => {
            const { height } = one.getBoundingClientRect();
            return height > 0 && height < least;
        }).map((one) => one.id || one.textContent)""",
        least,
    )


def test_numbers_change_and_nothing_moves(page):
    def places() -> list[Any]:
        return page.evaluate(
            "() => ['controls', 'timeline', 'mismatch', 'drift', 'reward', 'command', 'presets']"
            ".map((id) => document.getElementById(id).getBoundingClientRect().top + scrollY)"
        )

    before = places()
    for key, value in {"precision": "fp4", "samplers": 16, "max_staleness": 8, "batch": 1,
                       "backward": "high_precision", "weight_sync": True}.items():  # fmt: skip
        move(page, key, value)
        assert places() == before, key


def test_both_themes_change_the_paper(page):
    def paper() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = paper()
    page.locator("input[name=theme][value=dark]").check(force=True)
    dark = paper()
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(20, 23, 27)")
    page.emulate_media(color_scheme="dark")
    assert paper() == dark
    page.locator("input[name=theme][value=light]").check(force=True)
    assert paper() == light


def test_what_is_said_aloud_comes_once_and_late(page):
    for cap in range(8):
        move(page, "max_staleness", cap)
    until(page, "document.querySelector('#said').textContent.includes('steps')")
    of = summarize(simulate(Settings(max_staleness=7)))
    said = page.locator("#said").text_content()
    assert re.fullmatch(rf"{of.optimizer_steps} steps, reward {of.final_reward:.3f}, .*", said)
