"""Real ablations: their runs in MLflow, an arm that fails, a second start, and Ray."""

import json
import signal
import time
from pathlib import Path

import pytest
from ablations import TASK, Ablation, children_of, kill, make_ablation
from lightning.pytorch import callbacks
from mlflow.artifacts import download_artifacts
from typer.testing import CliRunner

from lightning_qrl.ablation.ablate import find_ingredients, is_ingredient
from lightning_qrl.cli import app
from lightning_qrl.recipe import load_recipe
from lightning_qrl.tracking import tags


def test_what_watches_is_no_ingredient():
    quantizes = ["forward_quantization", "dequantized_backward", "bf16_tail", "sensitive_weights"]
    found = find_ingredients(load_recipe("4bitter"), here=False)
    assert found == [*quantizes, "no_decay_on_quantized"]
    assert find_ingredients(load_recipe("base"), here=True) == []
    watched = ["callbacks.gradient_noise_scale={}", "trainer.accumulate_grad_batches=2"]
    fp16 = load_recipe("fp16", watched)
    assert find_ingredients(fp16, here=False) == ["fp16"]


def test_of_lightnings_own_only_what_watches_is_no_ingredient():
    watches = [
        callbacks.ModelCheckpoint(),
        callbacks.LearningRateMonitor(),
        callbacks.DeviceStatsMonitor(),
        callbacks.RichProgressBar(),
        callbacks.TQDMProgressBar(),
        callbacks.ModelSummary(),
    ]
    changes = [
        callbacks.StochasticWeightAveraging(swa_lrs=0.1),
        callbacks.GradientAccumulationScheduler({0: 2}),
        callbacks.ModelPruning("l1_unstructured"),
        callbacks.WeightAveraging(),
        callbacks.EMAWeightAveraging(),
        callbacks.BackboneFinetuning(),
        callbacks.EarlyStopping("eval/reward"),
        callbacks.Timer(duration="00:00:01:00"),
        callbacks.LambdaCallback(),
    ]
    assert not [callback for callback in watches if is_ingredient(callback)]
    assert [callback for callback in changes if is_ingredient(callback)] == changes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["policy.nmae=x"], "policy.nmae: no such key; did you mean name"),
        (["grpo.loss=dapo,gpso"], "grpo.loss"),
        (["callbacks.bf16_tail.fraction=2"], "callbacks.bf16_tail"),
        (["grpo.loss=dapo,gspo", "grpo.loss=cispo"], "command line: grpo.loss is given twice"),
        (["--drop", "bf16_tail", "--pairs"], "--pairs: there is no pair"),
    ],
)
def test_what_cannot_be_run_leaves_nothing_behind(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["ablate", "--recipe", "4bitter", *arguments])
    assert done.exit_code
    assert said in str(done.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_ablation_is_a_parent_and_its_children(tmp_path, tiny_policy):
    ablation = make_ablation(
        tmp_path / "a", tiny_policy.name, "--seeds", "2", "--jobs", "2", steps=4
    )
    code, said = ablation.finish()
    assert code == 0, said
    assert "without forward_quantization = empty" in said
    assert "4/4 done" in said
    (parent,) = ablation.parents()
    assert f"compare  qrl compare {parent.info.run_id}" in said
    assert parent.info.run_name == "ablate-tiny"
    assert parent.info.status == "FINISHED"
    assert parent.data.tags[tags.KIND] == tags.ABLATION
    where = {"run_id": parent.info.run_id, "tracking_uri": ablation.uri}
    design = json.loads(Path(download_artifacts(artifact_path="design.json", **where)).read_text())
    assert design["hash"] == parent.data.tags[tags.DESIGN]
    counting = ablation.counting()
    assert set(counting) == {(arm, seed) for arm in ("full", "empty") for seed in (0, 1)}
    for (arm, seed), run in counting.items():
        assert run.info.status == "FINISHED"
        assert run.info.run_name == f"{arm}-seed{seed}"
        own = run.data.tags
        assert own[tags.PARENT] == own[tags.MLFLOW_PARENT] == parent.info.run_id
        assert own[tags.REMOVED] == ("" if arm == "full" else "forward_quantization")
        assert own[tags.RECIPE] == "tiny"
        assert run.data.params["seed"] == str(seed)
    weights = ablation.weights()
    assert len(set(weights.values())) == 4
    again, said = ablation.finish()
    assert again == 0
    assert "continued: 4/4 done" in said
    assert ablation.weights() == weights
    assert len(ablation.runs()) == 4
    assert len(ablation.parents()) == 1


@pytest.mark.slow
def test_an_arm_that_fails_is_a_result_and_the_others_go_on(tmp_path, tiny_policy):
    options = ("--jobs", "2", "task.fails=true,false")
    ablation = make_ablation(tmp_path / "a", tiny_policy.name, *options, steps=3)
    code, said = ablation.finish()
    assert code == 1, said
    error = "no judge today"
    assert [line for line in said.splitlines() if line.startswith("failed  ") and error in line]
    assert "4/4 done" in said
    for (arm, _), run in ablation.counting().items():
        failed = arm.endswith("fails=true")
        assert run.info.status == ("FAILED" if failed else "FINISHED")
        assert (error in run.data.tags.get(tags.ERROR, "")) == failed
    (parent,) = ablation.parents()
    assert parent.info.status == "FINISHED"
    (ablation.folder / "outside.py").write_text(TASK.replace("if self.fails", "if False"))
    code, said = ablation.finish()  # it was the judge, who is back
    assert code == 0, said
    for run in ablation.counting().values():
        assert run.info.status == "FINISHED"
        assert tags.ERROR not in run.data.tags


@pytest.mark.slow
def test_ctrl_c_stops_the_children_and_says_how_to_go_on(tmp_path, tiny_policy):
    ablation = make_ablation(tmp_path / "a", tiny_policy.name, "--jobs", "2", steps=2000)
    process = ablation.start()
    try:
        folder = _wait_for_steps(ablation)
    except AssertionError:
        kill([process.pid])
        raise
    second = Ablation(ablation.folder, ablation.command).finish()
    assert second == (2, f"qrl: this ablation is running already; its logs are in {folder}\n")
    children = children_of(process.pid)
    assert len(children) == 2
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "go on   the same command again" in said
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert {run.info.status for run in [*ablation.runs(), *ablation.parents()]} == {"KILLED"}


def _wait_for_steps(ablation: Ablation) -> Path:
    """The ablation's folder, once both of its children train."""
    for _ in range(1500):  # 5 minutes, on a busy machine
        logs = list((ablation.folder / "runs").glob("ablate-*/*.log"))
        if len([log for log in logs if "step 2/" in log.read_text()]) == 2:
            return logs[0].parent
        time.sleep(0.2)
    raise AssertionError("the children do not train")


@pytest.mark.slow
def test_ray_ends_with_the_weights_of_the_local_launcher(tmp_path, tiny_policy, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options = ("--seeds", "2", "--jobs", "2")
    here = make_ablation(tmp_path / "here", tiny_policy.name, *options, steps=6)
    there = make_ablation(
        tmp_path / "there", tiny_policy.name, *options, "--launcher", "ray", steps=6
    )
    code, said = here.finish()
    assert code == 0, said
    code, said = there.finish()
    assert code == 0, said
    assert "on Ray, 2 at once" in said
    weights = here.weights()
    assert len(weights) == 4
    assert there.weights() == weights
    assert {run.info.status for run in there.runs()} == {"FINISHED"}
