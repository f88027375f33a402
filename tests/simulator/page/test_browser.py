"""The page in a Chromium: every control moved, and what it then says against Python."""

from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import pytest

from lightning_qrl.simulator.page.values import plain
from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import PRESETS, Settings, idle
from tests.helpers.simulator_page import move, shown, until, wanted

pytestmark = pytest.mark.slow

MOVES: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16", "fp8", "fp4"),
    "backward": ("high_precision", "dequantized"),
    "bf16_tail": (False, True),
    "shared_experts": (True, False),
    "four_over_six": (True, False),
    "max_staleness": tuple(range(9)),
    "batch": (1, 4, 8, 16, 32),
    "samplers": (1, 3, 16),
    "horizon": ("short", "long", "med"),
    "weight_sync": (True, False),
    "seed": (1, 20, 0),
}


def test_every_control_gives_what_python_gives(page):
    settings, reactions = Settings(), []
    for key in ("precision", *MOVES):  # FP4 first, so that every control acts on something
        for value in MOVES[key]:
            move(page, key, value)
            settings = replace(settings, **{key: value})
            assert shown(page) == wanted(settings), settings
            (took,) = page.evaluate(
                "() => performance.getEntriesByName('reaction').map(({ duration }) => duration)"
            )
            reactions.append(took)
        if key == "precision":
            assert settings.precision == "fp4"
    reactions.sort()
    median, most = reactions[len(reactions) // 2], reactions[-1]
    print(f"\nreaction to a control: median {median:.1f} ms, at most {most:.1f} ms")


def test_every_preset_gives_what_python_gives(page):
    move(page, "max_staleness", 5)
    for name, preset in PRESETS.items():
        button = page.locator(f"button[data-preset={name}]")
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        assert shown(page) == wanted(Settings(max_staleness=5, **preset)), name


def test_the_page_says_that_it_agrees_with_python(page):
    assert page.locator("#agreement").text_content() == "All 8 agree."
    assert page.locator(".same").all_text_contents() == ["✓ yes"] * 8


def test_a_page_with_another_model_says_that_it_disagrees(browser, file):
    text = file.read_text("utf-8")
    assert text.count('"decay": 0.12') == 1
    file.write_text(text.replace('"decay": 0.12', '"decay": 0.1201'), "utf-8")
    page = browser.new_page()
    page.goto(file.as_uri())
    assert page.locator("#agreement").text_content() == "8 of 8 differ: this page is broken."
    page.close()


def test_a_link_carries_the_settings(browser, page, file):
    settings = Settings(precision="fp4", backward="high_precision", bf16_tail=False, batch=8,
                        max_staleness=7, weight_sync=True, samplers=9, horizon="short",
                        seed=3)  # fmt: skip
    for key, value in plain(settings).items():
        move(page, key, value)
    link = page.locator("#link").text_content()
    until(page, f"location.href === {link!r}")
    other = browser.new_page()
    other.goto(link)
    assert shown(other) == wanted(settings)
    assert other.evaluate("readControls()") == plain(settings)
    assert other.locator("#problem").is_hidden()
    other.close()
    command = page.locator("#command").text_content()
    words = dict(word.split("=") for word in command.removeprefix("qrl simulate ").split())
    assert words == {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in plain(settings).items()
        if value != plain(Settings())[key]
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"precision": "fp2"}, "precision is bf16 or fp8 or fp4, got fp2"),
        ({"batch": "0"}, "batch goes from 1 to 32 on this page, got 0"),
        ({"batch": "4.5"}, "batch is a whole number, got 4.5"),
        ({"weight_sync": ""}, "weight_sync is false or true, got nothing"),
        ({"colour": "<img src=x onerror=alert(1)>"}, "colour is no setting"),
        ({"seed": "<b>" + "9" * 99}, "seed is a whole number, got <b>99999"),
        ({"__proto__": "1"}, "__proto__ is no setting"),
    ],
)
def test_a_bad_link_says_what_is_wrong_and_keeps_the_rest(page, file, given, said):
    page.goto(f"{file.as_uri()}#{urlencode({**given, 'max_staleness': 6})}")
    assert said in page.locator("#problem").text_content()
    assert shown(page) == wanted(Settings(max_staleness=6))
    move(page, "max_staleness", 1)
    assert page.locator("#problem").is_hidden()


def test_a_link_full_of_problems_is_told_in_a_line(page, file):
    page.goto(f"{file.as_uri()}#{'&'.join(f'k{n}=1' for n in range(3000))}&batch=4&batch=8")
    said = page.locator("#problem").text_content()
    assert said.startswith(
        "In this link k0 is no setting; k1 is no setting; k2 is no setting; and 2998"
    )
    assert page.locator("#problem").bounding_box()["height"] < 60
    page.goto(f"{file.as_uri()}#batch=4&batch=16&batch=8")
    said = page.locator("#problem").text_content()
    assert "batch is given more than once, and the last value counts" in said
    assert said.count("batch") == 1
    assert shown(page) == wanted(Settings(batch=8))


def test_a_link_pasted_into_an_open_page_is_followed(page):
    page.evaluate("location.hash = '#precision=bf16&samplers=2'")
    until(page, "document.querySelector('#samplers').value === '2'")
    assert shown(page) == wanted(Settings(precision="bf16", samplers=2))


def test_a_run_that_is_held_stays_beside_the_next_ones(page):
    was = page.locator("#outcome .was")
    assert was.first.is_hidden()
    page.locator("#hold").click()
    page.locator("button[data-preset=fp4_naive]").click()
    naive = wanted(Settings(**PRESETS["fp4_naive"]))
    assert shown(page) == naive
    assert was.all_text_contents() == list(wanted(Settings()).values())
    assert page.locator("#held-as code").text_content() == "qrl simulate"
    assert page.locator("path.held").count() == 3
    page.locator("#hold").click()
    assert was.first.is_hidden()
    assert page.locator("path.held").count() == 0


def test_the_keyboard_is_enough(page):
    page.locator("#max_staleness").focus()
    page.keyboard.press("ArrowRight")
    assert shown(page) == wanted(Settings(max_staleness=3))
    page.locator("input[name=precision]:checked").focus()
    page.keyboard.press("ArrowRight")
    assert shown(page) == wanted(Settings(max_staleness=3, precision="fp4"))
    page.locator("#four_over_six").focus()
    page.keyboard.press("Space")  # acts on the switch, and does not play
    settings = Settings(max_staleness=3, precision="fp4", four_over_six=True)
    assert shown(page) == wanted(settings)
    assert page.locator("#play").get_attribute("aria-label") == "Play"
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Space")
    assert page.locator("#play").get_attribute("aria-label") == "Pause"
    until(page, "document.querySelector('#time').valueAsNumber > 1")
    page.keyboard.press("Space")
    assert page.locator("#play").get_attribute("aria-label") == "Play"
    assert shown(page) == wanted(settings)  # time does not change what comes of a run


def test_playing_ends_at_the_end(page):
    page.locator("#speed").select_option("20")
    page.locator("#play").click()
    until(page, "document.querySelector('#time').valueAsNumber < 60")
    until(page, "document.querySelector('#play').ariaLabel === 'Play'")
    assert page.locator("#clock").text_content() == "66.0 of 66"


def test_the_moment_is_that_of_the_trace(page):
    trace = simulate(Settings())
    for time in (0.0, 7.3, 20.1, 41.7, 60.0):
        page.locator("#time").evaluate(
            "(input, time) => { input.value = time; input.dispatchEvent(new Event('input')) }", time
        )
        said = page.locator("#now").text_content()
        done = sum(step.end <= time for step in trace.steps)
        writing = sum(one.start <= time < (one.queued or one.end) for one in trace.rollouts)
        assert f"version {done}" in said
        assert f"samplers: {writing} of 4 write" in said
        spoken = page.locator("#time").get_attribute("aria-valuetext")
        assert spoken.startswith(f"{time:.1f} of 66, trainer: ")
        drift = f"drift {trace.steps[done - 1].drift:.2f}" if done else "no step yet"
        assert drift in said
        assert drift in spoken


def test_at_the_end_the_moment_is_the_outcome(page):
    for cap in (0, 2, 5):
        move(page, "max_staleness", cap)
        of = wanted(Settings(max_staleness=cap))
        last = int(of["optimizer_steps"]) - 1
        said = page.locator("#now").text_content()
        assert f"after step {last}: drift {of['final_drift']}, reward {of['final_reward']}" in said


def test_controls_without_effect_say_why(page):
    for precision in ("bf16", "fp8", "fp4"):
        move(page, "precision", precision)
        said = {
            control.get_attribute("data-key"): control.locator(".about").text_content()
            for control in page.locator(".idle").all()
        }
        why = idle(Settings(precision=precision))
        assert said == {key: f"No effect: {reason}." for key, reason in why.items()}


def test_a_run_without_a_step_says_why(page, file):
    settings = Settings(precision="bf16", horizon="long", batch=32, samplers=1)
    page.goto(
        f"{file.as_uri()}#{urlencode({k: str(v) for k, v in plain(settings).items()}).lower()}"
    )
    assert page.locator("#why").text_content() == simulate(settings).why_no_step
    assert shown(page) == wanted(settings)
