"""Real runs from the first step to the last word in MLflow, also when they are cut short."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import pytest
import torch
from mlflow import MlflowClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_qrl.errors import UserError
from lightning_qrl.launch import Outcome, check, find_origin, launch
from lightning_qrl.recipe import load_recipe, recipe_from_yaml

SMALL = [
    "trainer.accelerator=cpu",
    "grpo.prompts_per_rollout=2",
    "grpo.group_size=4",
    "callbacks.held_out_evaluation={prompts: 8, every_n_steps: 4}",
    "callbacks.sampled_completions={every_n_steps: 2, count: 2}",
    "callbacks.checkpoint.every_n_epochs=2",
]

OF_THE_MACHINE = ("system/", "perf/")  # metrics that are not of each step


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    """One database for all: to make one takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def here(tmp_path, monkeypatch, uri) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return tmp_path


def recipe(*overrides: str, name: str = "4bitter", steps: int = 3):
    return load_recipe(name, [*SMALL, f"trainer.max_steps={steps}", *overrides])


def resume(run: str, *overrides: str) -> Outcome:
    """What `qrl fit --resume RUN` does."""
    origin = find_origin(run, None)
    stored = recipe_from_yaml(origin.recipe.to_yaml(), origin.recipe.name, overrides)
    return launch(stored, origin)


def run_of(outcome: Outcome):
    return MlflowClient(outcome.run.uri).get_run(outcome.run.run_id)


def only_run(experiment: str, uri: str):
    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    (run,) = client.search_runs([found.experiment_id])
    return run


def steps_of(uri: str, run_id: str) -> dict[str, list[int]]:
    """The steps at which each metric was recorded, in the order of recording."""
    client = MlflowClient(uri)
    keys = client.get_run(run_id).data.metrics
    return {key: [m.step for m in client.get_metric_history(run_id, key)] for key in keys}


def assert_each_step_once(uri: str, run_id: str, steps: int, evaluations: list[int]) -> None:
    recorded = steps_of(uri, run_id)
    assert "train/reward" in recorded
    assert "quant/num_layers_quantized" in recorded
    assert {"perf/max_memory_rss_gb", "system/cpu_utilization_percentage"} <= recorded.keys()
    for key, at in recorded.items():
        if key.startswith(OF_THE_MACHINE):
            continue
        expected = evaluations if key.startswith("eval/") else list(range(1, steps + 1))
        assert sorted(at) == expected, key


def artefact(uri: str, run_id: str, name: str) -> str:
    return Path(MlflowClient(uri).download_artifacts(run_id, name)).read_text()


def table(uri: str, run_id: str) -> list[list[object]]:
    rows: list[list[object]] = json.loads(artefact(uri, run_id, "completions.json"))["data"]
    return rows


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return state


def assert_same_weights(a: Path, b: Path) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_a_run_is_recorded_whole(here, uri):
    given = recipe("tracking={experiment: whole, run_name: 'a name'}")
    outcome = launch(given)
    assert (outcome.status, outcome.exit_code) == ("FINISHED", 0)
    run = run_of(outcome)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "a name")
    assert only_run("whole", uri).info.run_id == run.info.run_id
    flat = given.flat()
    assert run.data.params == {key: str(value) for key, value in flat.items()}
    assert len(flat) > 40
    tags = run.data.tags
    assert (tags["qrl.recipe"], tags["qrl.seed"]) == ("4bitter", "0")
    assert len(tags.get("qrl.git_commit", "0" * 40)) == 40
    assert "nvfp4 forward on" in tags["qrl.plan"]
    assert (
        recipe_from_yaml(artefact(uri, run.info.run_id, "recipe.yaml"), "x").values == given.values
    )
    plan = artefact(uri, run.info.run_id, "plan.txt").splitlines()
    columns = json.loads(artefact(uri, run.info.run_id, "plan.json"))
    assert len(plan) - 1 == len(columns["layer"]) == 57
    assert_each_step_once(uri, run.info.run_id, 3, [0, 3])
    rows = table(uri, run.info.run_id)
    assert [(row[0], row[1], row[5]) for row in rows] == [
        (step, "train", step - 1) for step in (1, 2, 3) for _ in range(2)
    ]
    assert all(isinstance(text, str) for row in rows for text in row[1:4])
    assert sorted(outcome.evaluations) == [0, 3]


def test_the_trained_policy_loads_in_plain_transformers_and_as_a_policy(here):
    outcome = launch(recipe())
    folder = outcome.folder / "policy"
    (checkpoint,) = (outcome.folder / "checkpoints").glob("*.ckpt")
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)("12+34=", return_tensors="pt")
    assert model(**ids).logits.isfinite().all()
    assert type(model).__module__.startswith("transformers.")
    assert {type(m) for n, m in model.named_modules() if n.endswith("_proj")} == {torch.nn.Linear}
    again = launch(recipe(f"policy.name={folder}", steps=1))
    assert again.status == "FINISHED"
    first = outcome.evaluations[3]["reward"]
    assert again.evaluations[0]["reward"] == first  # the same weights, the same draws
    saved = torch.load(checkpoint, weights_only=True)
    assert all(name.startswith("model.") for name in saved["state_dict"])


class Broken(L.Callback):
    """Fails in the second step."""

    def on_train_batch_end(self, *args: object) -> None:
        if args[0].global_step == 2:  # type: ignore[attr-defined]
            raise RuntimeError("broken on purpose")


class Interrupted(L.Callback):
    """Interrupts itself in the second step, with the signal that it is told."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_batch_end(self, *args: object) -> None:
        if args[0].global_step == 2:  # type: ignore[attr-defined]
            os.kill(os.getpid(), self.number)


def here_is(kind: type, name: str) -> str:
    """A `_target_` for a class of this file."""
    module = sys.modules[kind.__module__]
    sys.modules["qrl_test_launch"] = module
    return f"callbacks.{name}._target_=qrl_test_launch.{kind.__name__}"


def test_a_run_that_raises_is_failed_and_its_traceback_is_the_users(here, uri):
    overrides = ["tracking.experiment=raises", here_is(Broken, "broken")]
    says = r"RuntimeError: broken on purpose \(raised in callbacks.broken\); traceback: /"
    with pytest.raises(UserError, match=says) as caught:
        launch(recipe(*overrides))
    assert isinstance(caught.value.__cause__, RuntimeError)
    run = only_run("raises", uri)
    assert run.info.status == "FAILED"
    assert run.info.end_time
    assert steps_of(uri, run.info.run_id)["train/reward"] == [1, 2]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_is_killed_and_can_be_resumed(here, uri, capfd, number, code):
    overrides = [here_is(Interrupted, "stop"), f"callbacks.stop.number={int(number)}"]
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    outcome = launch(recipe(*overrides, f"tracking.experiment=killed{code}", steps=4))
    assert (outcome.status, outcome.exit_code) == ("KILLED", code)
    assert run_of(outcome).info.status == "KILLED"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert not (outcome.folder / "policy").exists()
    said = "qrl: stopping after this rollout phase; again to stop at once"
    assert capfd.readouterr().err.count(said) == 1
    saved = torch.load(outcome.folder / "checkpoints" / "stopped.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    assert sorted(outcome.evaluations) == [0]


def test_a_supervised_run_is_recorded(here, uri):
    small = SMALL[3:5]
    given = load_recipe(
        "warmup", ["policy.init=random", "supervised.batch_size=8", "trainer.max_steps=3", *small]
    )
    outcome = launch(given)
    assert outcome.status == "FINISHED"
    recorded = steps_of(uri, outcome.run.run_id)
    assert recorded["train/loss"] == recorded["train/grad_norm"] == [1, 2, 3]
    assert recorded["eval/reward"] == [0, 3]


def test_a_run_without_callbacks_is_recorded(here, uri):
    keys = list(load_recipe("base").values["callbacks"])
    outcome = launch(recipe(*(f"callbacks.{key}=null" for key in keys), name="base", steps=2))
    assert outcome.status == "FINISHED"
    assert outcome.evaluations == {}
    assert steps_of(uri, outcome.run.run_id)["train/loss"] == [1, 2]


MORTAL = """
import os, signal
import lightning as L

class Mortal(L.Callback):
    def __init__(self, hook: str = "on_train_batch_end") -> None:
        setattr(self, hook, lambda trainer, *rest, **more: self.perhaps(trainer.global_step))

    def perhaps(self, step: int) -> None:
        if step == int(os.environ.get("DIE_AT", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
"""
QRL = [sys.executable, "-c", "from lightning_qrl.cli import main; main()"]


def qrl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([*QRL, *arguments], env=env, capture_output=True, text=True, check=False)


def check_resume(here: Path, uri: str, die_at: int, hook: str, steps: int, *overrides: str) -> None:
    """A run killed at a step and resumed equals one that was left alone."""
    (here / "mortal.py").write_text(MORTAL)
    name = here.name
    given = [
        *overrides,
        f"callbacks.mortal={{_target_: mortal.Mortal, hook: {hook}}}",
        f"tracking={{experiment: killed-{name}, run_name: {name}}}",
        f"trainer.max_steps={steps}",
    ]
    arguments = ["fit", "--recipe", "4bitter", *SMALL, *given]
    died = qrl(*arguments, DIE_AT=str(die_at))
    assert died.returncode == -signal.SIGKILL, died.stderr
    killed = only_run(f"killed-{name}", uri)
    assert killed.info.status == "RUNNING"
    resumed = resume(name)
    assert (resumed.status, resumed.run.run_id) == ("FINISHED", killed.info.run_id)
    assert only_run(f"killed-{name}", uri).info.status == "FINISHED"
    alone = launch(load_recipe("4bitter", [*SMALL, *given, f"tracking.experiment=alone-{name}"]))
    assert_same_weights(resumed.folder / "policy", alone.folder / "policy")
    evaluations = sorted({*range(0, steps + 1, 4), steps})
    for outcome in (resumed, alone):
        assert_each_step_once(uri, outcome.run.run_id, steps, evaluations)
        assert sorted(outcome.evaluations) == evaluations
    assert resumed.evaluations == alone.evaluations
    assert table(uri, resumed.run.run_id) == table(uri, alone.run.run_id)
    norms = MlflowClient(uri).get_metric_history(alone.run.run_id, "train/grad_norm")
    assert any(norm.value > 0 for norm in norms)
    first, second = (run_of(outcome).data.metrics for outcome in (resumed, alone))
    timing = ("train/step_time", "train/tokens_per_second", "timing_s/", *OF_THE_MACHINE)
    assert {k: v for k, v in first.items() if not k.startswith(timing)} == {
        k: v for k, v in second.items() if not k.startswith(timing)
    }


def test_a_killed_run_resumes_bit_for_bit_in_the_same_mlflow_run(here, uri):
    check_resume(here, uri, 7, "on_train_batch_end", 12)


# recipes/nvfp4_pretraining.yaml, which rounds gradients stochastically
PRETRAINING = [
    "callbacks.dequantized_backward=null",
    "callbacks.forward_quantization={format: nvfp4, weight: {block: [16, 16]}}",
    "callbacks.quantized_backward={format: nvfp4, rounding: stochastic, hadamard: 16}",
]


@pytest.mark.slow
def test_a_killed_run_with_noise_in_its_rounding_resumes_bit_for_bit(here, uri):
    check_resume(here, uri, 7, "on_train_batch_end", 12, *PRETRAINING)


UPDATES = ["grpo.minibatches=2", "grpo.num_iterations=2", "trainer.accumulate_grad_batches=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("die_at", "hook"),
    [
        (9, "on_train_batch_end"),
        (10, "on_train_batch_start"),
        (11, "on_before_optimizer_step"),
        (16, "on_train_epoch_end"),
        (16, "on_train_epoch_start"),
        (20, "on_train_end"),
    ],
)
def test_killed_at_any_moment_with_several_updates_a_rollout(here, uri, die_at, hook):
    check_resume(here, uri, die_at, hook, 20, *UPDATES)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("seconds", [0.0, 0.7])
def test_a_signal_from_outside_leaves_no_run_running(here, uri, number, seconds):
    experiment = f"outside-{here.name}"
    arguments = ["fit", "--recipe", "4bitter", *SMALL, f"tracking.experiment={experiment}"]
    process = subprocess.Popen([*QRL, *arguments, "trainer.max_steps=5000"], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    client = MlflowClient(uri)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = client.get_experiment_by_name(experiment)
        if found is not None and client.search_runs([found.experiment_id]):
            break
        time.sleep(0.05)
    time.sleep(seconds)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    assert only_run(experiment, uri).info.status == "KILLED"


def test_a_finished_run_goes_on_with_more_steps(here, uri):
    first = launch(recipe("tracking.run_name=more", steps=4))
    assert resume("more").status == "FINISHED"  # nothing is left to do
    more = resume(first.run.run_id, "trainer.max_steps=6")
    assert more.run.run_id == first.run.run_id
    assert_each_step_once(uri, more.run.run_id, 6, [0, 4, 6])
    alone = launch(recipe(steps=6))
    assert_same_weights(more.folder / "policy", alone.folder / "policy")
    with pytest.raises(UserError, match=r"beyond trainer\.max_steps \(3\)"):
        resume("more", "trainer.max_steps=3")


def test_a_checkpoint_goes_on_under_another_stack_in_a_new_run(here, uri):
    first = launch(recipe(steps=2))
    (checkpoint,) = (first.folder / "checkpoints").glob("*.ckpt")
    for found in (first.run.run_id, first.folder.name, str(first.folder), str(checkpoint)):
        origin = find_origin(found, None)
        assert origin.checkpoint.resolve() == checkpoint.resolve()
        assert (origin.run_id, origin.step) == (first.run.run_id, 2)
    second = launch(recipe("optimizer.weight_decay=0.0", name="bf16", steps=4), origin)
    assert second.run.run_id != first.run.run_id
    assert run_of(second).data.tags["qrl.resumed_from"] == first.run.run_id
    assert run_of(first).info.status == run_of(second).info.status == "FINISHED"
    recorded = steps_of(uri, second.run.run_id)
    assert recorded["train/loss"] == [3, 4]
    assert recorded["eval/reward"] == [2, 4]  # the new stack is measured before it trains
    saved = torch.load(next((second.folder / "checkpoints").glob("*.ckpt")), weights_only=True)
    steps = {float(state["step"]) for state in saved["optimizer_states"][0]["state"].values()}
    assert steps == {float(saved["global_step"])}  # the moments were taken over, not begun anew


def test_a_run_that_is_not_at_this_server_goes_on_as_a_new_one(here, capsys):
    first = launch(recipe(steps=2))
    (checkpoint,) = (first.folder / "checkpoints").glob("*.ckpt")
    second = resume(str(checkpoint), "tracking.uri=sqlite:///other.db", "trainer.max_steps=3")
    assert run_of(second).data.tags["qrl.resumed_from"] == first.run.run_id
    assert "continues there as a new run" in capsys.readouterr().err


def test_a_checkpoint_inside_a_rollout_phase_is_refused(here):
    run = launch(recipe(*UPDATES[:2], steps=6))
    with pytest.raises(UserError, match="inside a rollout phase of 4 steps"):
        resume(run.run.run_id, "trainer.max_steps=12")


def test_a_checkpoint_of_another_architecture_is_refused(here, tiny_policy):
    run = launch(recipe(steps=2))
    origin = find_origin(run.run.run_id, None)
    with pytest.raises(UserError, match=r"does not fit policy .* weights differ, such as model\."):
        check(recipe(f"policy.name={tiny_policy.name}"), origin)
