"""`qrl recipes`: ls, show, cp, validate, diff."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_qrl.cli import app
from lightning_qrl.errors import UserError
from lightning_qrl.recipe import find_recipe, load_recipe, recipe_names


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["recipes", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def refused(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(app, ["recipes", *arguments], catch_exceptions=False)
    return str(caught.value)


def test_ls_has_a_line_for_each_recipe_with_its_purpose(here):
    (here / "base.yaml").write_text("")  # a file of that name here changes nothing
    lines = said("ls").splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert all(len(line.split()) > 3 for line in lines)


def test_show_prints_the_file_and_resolved_prints_the_whole():
    assert said("show", "4bitter") == find_recipe("4bitter").read_text()
    assert said("show", "4bitter", "--resolved") == load_recipe("4bitter").to_yaml()


def test_show_of_a_binary_file_is_refused(here):
    (here / "x.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not readable as YAML" in refused("show", "x.yaml")
    assert "not readable as YAML" in refused("cp", "x.yaml", "y.yaml")
    assert not (here / "y.yaml").exists()


def test_cp_copies_to_a_file_or_into_a_folder(here):
    assert said("cp", "4bitter", "mine.yaml") == "mine.yaml\n"
    assert load_recipe("mine").values == load_recipe("4bitter").values
    (here / "folder").mkdir()
    assert said("cp", "bf16", "folder") == "folder/bf16.yaml\n"


def test_cp_overwrites_nothing_and_says_what_is_wrong(here):
    (here / "mine.yaml").write_text("mine")
    assert refused("cp", "4bitter", "mine.yaml").startswith("mine.yaml is there already")
    assert (here / "mine.yaml").read_text() == "mine"
    assert "cannot be written" in refused("cp", "4bitter", "nowhere/mine.yaml")
    assert "cannot be written" in refused("cp", "4bitter", "mine.yaml/x.yaml")


def test_validate_says_what_the_plan_is_or_what_is_wrong(here):
    assert "nvfp4 forward on" in said("validate", "4bitter")
    Path("bad.yaml").write_text("extends: 4bitter\ncallbacks: {bf16_tail: {fraction: 2}}")
    assert refused("validate", "bad.yaml").startswith(
        "bad.yaml: callbacks.bf16_tail: fraction must"
    )


def test_diff_shows_what_differs(here):
    lines = said("diff", "bf16", "4bitter").splitlines()
    assert lines[:2] == ["--- bf16", "+++ 4bitter"]
    assert any(line.startswith("+") and "bf16_tail" in line for line in lines)
    assert said("diff", "bf16", "bf16") == ""
