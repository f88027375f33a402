"""A plugin is a file, and the object in it is named like the file."""

import sys

import pytest

from lightning_qrl.plugins import load_plugin, plugin_names


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "made_up_plugins"
    folder.mkdir()
    files = {
        "__init__": "",
        "base": "class Base: ...",
        "_private": "",
        "one_word": "from collections import OrderedDict\nclass OneWord: ...",
        "dr_grpo": "_dr_grpo = 1\ndef dr_grpo(): ...",
        "bf16_tail": "class BF16Tail: ...",
        "hollow": "x = 1",
    }
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield "made_up_plugins"
    for name in [m for m in sys.modules if m.startswith("made_up_plugins")]:
        del sys.modules[name]


def test_names_are_the_public_modules(package):
    assert plugin_names(package) == ["bf16_tail", "dr_grpo", "hollow", "one_word"]


@pytest.mark.parametrize(
    ("name", "found"),
    [("one_word", "OneWord"), ("dr_grpo", "dr_grpo"), ("bf16_tail", "BF16Tail")],
)
def test_class_or_function_whatever_the_capitals(package, name, found):
    assert load_plugin(package, name).__name__ == found


def test_a_name_that_is_not_there_gets_the_nearest(package):
    with pytest.raises(ValueError, match="did you mean dr_grpo"):
        load_plugin(package, "dr_gpo")
    with pytest.raises(ValueError, match="known: bf16_tail, dr_grpo, hollow, one_word"):
        load_plugin(package, "zzz")


def test_a_file_without_its_object_says_so(package):
    with pytest.raises(ValueError, match="hollow defines no class or function named like it"):
        load_plugin(package, "hollow")
