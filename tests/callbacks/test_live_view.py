"""The live view: lines without a terminal; the panel on one is seen in tests/cli/test_fit.py."""

import math

import pytest

from callbacks.live_view import LiveView
from lightning_qrl.build import build
from lightning_qrl.recipe import load_recipe

SMALL = ["trainer.accelerator=cpu", "grpo.prompts_per_rollout=2", "grpo.group_size=4"]


def lines(fit, capsys, every, steps, micro_batches=1):
    overrides = [f"trainer.max_steps={steps}", f"trainer.accumulate_grad_batches={micro_batches}"]
    run = build(load_recipe("base", [*SMALL, *overrides]))
    fit(run.module, run.data, steps, callbacks=[LiveView(every)],
        accumulate_grad_batches=micro_batches)  # fmt: skip
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_line_every_n_steps_and_at_the_end(fit, capsys, micro_batches):
    shown = lines(fit, capsys, 2, 5, micro_batches)
    assert [line.split("  ")[0] for line in shown] == ["step 2/5", "step 4/5", "step 5/5"]
    for line in shown:
        assert all(name in line for name in ("reward 0.", "entropy", "grad norm", "|Δlogprob|"))
        assert line.endswith(" left")


def test_what_is_odd_is_explained_once_when_it_begins(fit, capsys):
    class Reward:
        """Equal rewards from the second step on; some are missing in the third."""

        def __init__(self, task):
            self.prompts, self.solved, self.asked = task.prompts, task.solved, -1

        def reward(self, prompt, completion):
            self.asked += 1
            step, completion = divmod(self.asked, 8)
            if step == 2 and completion < 2:
                return math.nan
            return float(completion % 2) if step == 0 else 0.5

    run = build(load_recipe("base", [*SMALL, "trainer.max_steps=4"]))
    run.module.task = Reward(run.module.task)
    fit(run.module, run.data, 4, callbacks=[LiveView(1)])
    shown = capsys.readouterr().out.splitlines()
    marks = [line.split(" ")[1] for line in shown if line.startswith(("step", "note"))]
    assert marks == ["1/4", "2/4", "100%", "3/4", "2", "4/4"]


def test_a_failure_stops_the_panel(monkeypatch):
    stopped = []
    view = LiveView()
    view._live = type("Live", (), {"stop": lambda self: stopped.append(True)})()
    view.on_exception(None, None, RuntimeError())
    view.on_train_end(None, None)
    assert stopped == [True]


def test_bad_arguments():
    with pytest.raises(ValueError, match="must be at least 1"):
        LiveView(0)
