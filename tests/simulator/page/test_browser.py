"""The page in a Chromium: every control moved, and what it then says against Python."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from lightning_qrl.simulator.page import write_page
from lightning_qrl.simulator.page.values import plain
from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import PRESETS, Settings
from lightning_qrl.simulator.summary import summarize

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: [page]")
pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, BROWSERS)), None)
        own = playwright.chromium.executable_path
        executable = found or (own if Path(own).exists() else None)
        if executable is None:
            pytest.skip("no Chromium on this machine: playwright install chromium")
        chromium = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_page(tmp_path / "page.html")
    return tmp_path / "page.html"


@pytest.fixture
def page(browser, file) -> Iterator[Any]:
    """The page, opened; it may load nothing else, and must not complain."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    requests: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(file.as_uri())
    yield page
    context.close()
    assert {url.partition("#")[0] for url in requests} - {"data:,"} == {file.as_uri()}
    assert not complaints


def move(page: Any, key: str, value: Any) -> None:
    """Set a control as a person does: an event, not an assignment."""
    if isinstance(value, bool):
        page.locator(f"#{key}").set_checked(value)
    elif isinstance(value, str):
        page.locator(f"input[name={key}][value={value}]").check(force=True)
    else:
        page.locator(f"#{key}").fill(str(value))


def until(page: Any, holds: str) -> None:
    """Wait for what JavaScript says; the page's policy bars playwright's own way to."""
    for _ in range(600):
        if page.evaluate(holds):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never came: {holds}")


def shown(page: Any) -> dict[str, str]:
    return page.evaluate(
        "() => Object.fromEntries([...document.querySelectorAll('#outcome dd[data-outcome]')]"
        ".map((cell) => [cell.dataset.outcome, cell.textContent]))"
    )


def wanted(settings: Settings) -> dict[str, str]:
    trace = simulate(settings)
    of = summarize(trace)
    verdict = "stable" if of.diverged_at_step is None else f"diverged at {of.diverged_at_step}"
    return {
        "final_reward": f"{of.final_reward:.3f}",
        "verdict": "no step" if of.why_no_step else verdict,
        "final_drift": f"{of.final_drift:.2f}",
        "optimizer_steps": str(of.optimizer_steps),
        "mean_staleness": f"{of.mean_staleness:.2f}",
        "discarded": str(of.discarded),
        "quantization_floor": f"{of.quantization_floor:.4f}",
        "sampler_utilization": f"{100 * trace.sampler_utilization:.0f}%",
        "trainer_utilization": f"{100 * trace.trainer_utilization:.0f}%",
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


def test_controls_without_effect_say_so(page):
    def idle() -> dict[str, str]:
        return {
            control.get_attribute("data-key"): control.locator(".about").text_content()
            for control in page.locator(".idle").all()
        }

    move(page, "precision", "bf16")
    assert list(idle()) == ["backward", "bf16_tail", "shared_experts", "four_over_six"]
    assert all(text.startswith("No effect") for text in idle().values())
    move(page, "precision", "fp8")
    assert list(idle()) == ["four_over_six"]
    move(page, "precision", "fp4")
    assert idle() == {}


def test_a_run_without_a_step_says_why(page, file):
    settings = Settings(precision="bf16", horizon="long", batch=32, samplers=1)
    page.goto(
        f"{file.as_uri()}#{urlencode({k: str(v) for k, v in plain(settings).items()}).lower()}"
    )
    assert page.locator("#why").text_content() == simulate(settings).why_no_step
    assert shown(page) == wanted(settings)


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


def test_numbers_change_and_nothing_moves(page):
    def places() -> list[Any]:
        return page.evaluate(
            "() => ['controls', 'timeline', 'mismatch', 'drift', 'reward', 'command', 'presets']"
            ".map((id) => document.getElementById(id).getBoundingClientRect().top)"
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
