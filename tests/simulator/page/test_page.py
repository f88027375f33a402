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
from lightning_qrl.simulator.constants import POST
from lightning_qrl.simulator.page import SCRIPTS, write_page
from lightning_qrl.simulator.page.controls import GROUPS, PRESET_WORDS
from lightning_qrl.simulator.page.values import page_values
from lightning_qrl.simulator.settings import PRESETS, Settings

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
    assert json.loads(values_in(page)) == page_values(Settings(), POST)


def test_no_text_on_the_page_comes_from_outside():
    def strings(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [*value, *(text for item in value.values() for text in strings(item))]
        if isinstance(value, list):
            return [text for item in value for text in strings(item)]
        return [value] if isinstance(value, str) else []

    assert all(re.fullmatch(r"\w+", text) for text in strings(page_values(Settings(), POST)))
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
        page = page_values(Settings(max_staleness=cap, weight_sync=sync), POST)
        for row in rows:
            if (row["max_staleness"], row["weight_sync"]) != (cap, sync):
                continue
            for key, value in page["presets"][row["config"]]["outcome"].items():
                assert row[key] == (value if value is None else pytest.approx(value, abs=0.0051))


def test_the_sliders_reach_what_the_page_starts_with(tmp_path):
    page = written(tmp_path, Settings(samplers=100, max_staleness=30))
    most = {spec["key"]: spec.get("most") for spec in json.loads(values_in(page))["specs"]}
    assert most["samplers"] == 100
    assert most["max_staleness"] == 30
    assert most["batch"] == 32


def test_a_page_with_other_constants_says_so(tmp_path):
    assert "--calibration" not in written(tmp_path)
    others = replace(POST, learning=replace(POST.learning, feedback=0.0))
    page = written(tmp_path, Settings(), others)
    assert "This page has constants of its own" in page
    assert json.loads(values_in(page))["constants"]["learning"]["feedback"] == 0


def test_the_same_settings_give_the_same_bytes(tmp_path):
    assert written(tmp_path) == written(tmp_path)


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="page .* cannot be written: No such file"):
        write_page(tmp_path / "nowhere" / "page.html")
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="taken cannot be written"):
        write_page(tmp_path / "taken")
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


def test_colours_are_those_of_the_comparison_page():
    own = (files("lightning_qrl.simulator.page") / "page.css").read_text()
    theirs = (files("lightning_qrl.reports.page") / "page.css").read_text()
    both = [re.findall(r"--(blue|vermilion|green|ink|paper|muted|lines): (#\w+)", css)
            for css in (own, theirs)]  # fmt: skip
    assert set(both[0]) == set(both[1])
