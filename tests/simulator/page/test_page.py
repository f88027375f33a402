"""The page as a file: what is in it, and what cannot be."""

import json
import re
from dataclasses import fields, replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from lightning_qrl.errors import UserError
from lightning_qrl.simulator.page import SCRIPTS, write_page
from lightning_qrl.simulator.page.controls import GROUPS, LARGEST, PRESET_WORDS, REACH
from lightning_qrl.simulator.page.values import page_values
from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import IDLE, LIMITS, PRESETS, Settings, idle

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "tests" / "simulator" / "simulator_table.json"
CONTROLS = {control.key: control for group in GROUPS.values() for control in group}


def written(folder: Path, *args: Any) -> str:
    write_page(folder / "page.html", *args)
    return (folder / "page.html").read_text("utf-8")


def values_in(page: str) -> str:
    (line,) = re.findall(r"^const PAGE = (.*);$", page, re.MULTILINE)
    return line


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))


def test_the_page_is_one_file_that_loads_nothing(tmp_path):
    page = written(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    assert not re.search(r"https?:|//[a-z]+\.|@import|fetch\(|XMLHttp|WebSocket|import\(", page)
    assert set(re.findall(r"url\(([^)]*)\)", page)) == {"#hatch"}
    tags = Tags()
    tags.feed(page)
    for tag, attributes in tags.seen:
        assert "src" not in attributes, tag
        assert attributes.get("href", "data:,") == "data:,", tag
        assert not [name for name in attributes if name.startswith("on")], tag
    policies = [
        attributes["content"]
        for tag, attributes in tags.seen
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policies
    assert policies[0].startswith("default-src 'none'")


def test_every_placeholder_is_filled(tmp_path):
    page = written(tmp_path)
    assert "{{" not in page
    assert "{%" not in page
    assert page.count("</script") == 1
    assert json.loads(values_in(page)) == page_values(Settings())


def test_no_text_on_the_page_comes_from_outside():
    def strings(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [*value, *(text for item in value.values() for text in strings(item))]
        if isinstance(value, list):
            return [text for item in value for text in strings(item)]
        return [value] if isinstance(value, str) else []

    assert all(re.fullmatch(r"[\w ]+", text) for text in strings(page_values(Settings())))
    for name in SCRIPTS:
        script = (files("lightning_qrl.simulator.page") / name).read_text()
        assert not re.search(r"</script|<!--", script, re.IGNORECASE), name
    with pytest.raises(ValueError, match="precision"):
        Settings(precision="</script><script>alert(1)</script>")


def test_every_setting_has_one_control_and_every_choice_has_words():
    names = [control.key for group in GROUPS.values() for control in group]
    assert sorted(names) == sorted(item.name for item in fields(Settings))
    for key, kind in get_type_hints(Settings).items():
        wanted = get_args(kind) or (("false", "true") if kind is bool else ())
        assert tuple(CONTROLS[key].choices) == tuple(wanted), key


def test_every_preset_has_words_and_its_recipe_exists():
    assert list(PRESET_WORDS) == list(PRESETS)
    for preset in PRESET_WORDS.values():
        assert (ROOT / "recipes" / preset.recipe.split()[0]).is_file()


def test_the_presets_outcomes_are_those_of_the_table():
    rows = [row for row in json.loads(TABLE.read_text())
            if (row["horizon"], row["batch"]) == ("med", 4)]  # fmt: skip
    for cap, sync in {(row["max_staleness"], row["weight_sync"]) for row in rows}:
        page = page_values(Settings(max_staleness=cap, weight_sync=sync))
        for row in rows:
            if (row["max_staleness"], row["weight_sync"]) != (cap, sync):
                continue
            for key, value in page["presets"][row["config"]]["outcome"].items():
                assert row[key] == (value if value is None else pytest.approx(value, abs=0.0051))


def test_the_sliders_reach_what_the_page_starts_with(tmp_path):
    page = written(tmp_path, Settings(samplers=32, max_staleness=16, seed=2**31 - 1))
    most = {spec["key"]: spec.get("most") for spec in json.loads(values_in(page))["specs"]}
    assert (most["samplers"], most["max_staleness"], most["seed"]) == (32, 16, 2**31 - 1)
    assert most["batch"] == 32


@pytest.mark.parametrize("key", LARGEST)
def test_more_than_a_page_can_show_is_refused_and_nothing_written(tmp_path, key):
    assert REACH[key] <= LARGEST[key] < LIMITS[key][1]
    with pytest.raises(UserError, match=rf"^{key} goes to {LARGEST[key]} on a page, got") as error:
        write_page(tmp_path / "page.html", Settings(**{key: LARGEST[key] + 1}))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())
    write_page(tmp_path / "page.html", Settings(**{key: LARGEST[key]}))


def test_why_a_setting_is_idle_comes_from_python(tmp_path):
    page = json.loads(values_in(written(tmp_path)))
    assert page["idle"] == {precision: dict(why) for precision, why in IDLE.items()}


def test_what_has_no_effect_changes_nothing():
    """Every key of a precision that is said to be idle, and no other."""
    other_values = {"backward": "high_precision", "bf16_tail": False, "shared_experts": True,
                    "four_over_six": True}  # fmt: skip
    for precision in ("bf16", "fp8", "fp4"):
        base = Settings(precision=precision)
        for key, value in other_values.items():
            other = replace(base, **{key: value})
            same = replace(simulate(other), settings=base) == simulate(base)
            assert same == (key in idle(base)), (precision, key)


def test_the_same_settings_give_the_same_bytes(tmp_path):
    assert written(tmp_path) == written(tmp_path)


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="page .* cannot be written: No such file"):
        write_page(tmp_path / "nowhere" / "page.html")
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="taken cannot be written"):
        write_page(tmp_path / "taken")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        write_page(tmp_path / "file" / "page.html")
    with pytest.raises(UserError, match="cannot be written: File name too long"):
        write_page(tmp_path / ("a" * 251 + ".html"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "taken"]


def test_a_name_as_long_as_can_be_is_written(tmp_path):
    file = tmp_path / ("a" * 250 + ".html")
    write_page(file)
    assert list(tmp_path.iterdir()) == [file]


def test_colours_are_those_of_the_comparison_page():
    own = (files("lightning_qrl.simulator.page") / "page.css").read_text()
    theirs = (files("lightning_qrl.reports.page") / "page.css").read_text()
    both = [re.findall(r"--(blue|vermilion|green|ink|paper|muted|lines): (#\w+)", css)
            for css in (own, theirs)]  # fmt: skip
    assert set(both[0]) == set(both[1])
