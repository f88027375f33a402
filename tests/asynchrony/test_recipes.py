"""Asynchrony in a recipe: what is refused, when it is read, and that the page's commands work."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_qrl.build import build
from lightning_qrl.errors import UserError
from lightning_qrl.recipe import load_recipe

PAGE = Path(__file__).resolve().parents[2] / "docs" / "asynchrony.md"
STALE = "rollout.max_staleness=2"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.max_staleness=-1"], "rollout: max_staleness must be at least 0"),
        (["rollout.max_staleness=0.5"], "rollout.max_staleness: Input should be a valid integer"),
        (["rollout.max_stalenes=2"], "rollout.max_stalenes: .* did you mean max_staleness"),
        (["rollout.queue_depth=2"], "rollout: queue_depth does nothing with max_staleness=0"),
        ([STALE, "rollout.samplers=4"], "rollout: samplers does nothing with completion_time=0"),
        ([STALE, "rollout.queue_depth=1"], "max_staleness=2 is out of reach: .* 1 versions old"),
        ([STALE, "rollout.weight_sync_every=9"], "leaves the samplers with weights .* 8 versions"),
        ([STALE, "grpo.minibatches=4"], "less than the 4 updates on one rollout"),
        ([STALE, "grpo.dynamic_sampling=1"], "dynamic_sampling=1 samples anew when"),
        (["grpo.asynchrony=1"], "grpo.asynchrony: no such key"),
    ],
)
def test_what_is_refused(overrides, says):
    with pytest.raises(UserError, match=says) as error:
        build(load_recipe("base", overrides))
    assert str(error.value).startswith("command line: ")


def test_supervised_training_has_nothing_to_be_stale():
    with pytest.raises(UserError, match="rollout.max_staleness: only GRPO"):
        build(load_recipe("warmup", [STALE]))


def test_one_key_can_be_swept():
    for value in (0, 1, 2, 8):
        data = build(load_recipe("base", [f"rollout.max_staleness={value}"])).data
        assert data.asynchrony.max_staleness == value


def test_the_pages_example_prints_what_the_page_shows():
    code, shown = re.search(
        r"<<'PYTHON'\n(.*?)PYTHON\n```\n\n```\n(.*?)```", PAGE.read_text(), re.S
    ).groups()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == shown


def test_the_pages_command_is_a_recipe():
    command = re.search(r"^qrl fit --recipe (\S+)((?:[^`])*)```", PAGE.read_text(), re.M)
    overrides = command[2].replace("\\\n", " ").split()
    assert len(overrides) == 5
    assert build(load_recipe(command[1], overrides)).data.asynchrony.samplers == 24
