"""`qrl inspect`: a line a weight, from a policy or a checkpoint, and a picture."""

import sys

import pytest
import torch
from typer.testing import CliRunner

from lightning_qrl.analysis.quantization_error import quantization_error
from lightning_qrl.cli import app
from lightning_qrl.formats import get_format

SMALL = ["trainer.accelerator=cpu", "grpo.prompts_per_rollout=2", "grpo.group_size=4"]


def inspected(*arguments: str) -> list[str]:
    done = CliRunner().invoke(app, ["inspect", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout.splitlines()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_line_for_each_weight_and_one_for_all(here, tiny_policy):
    options = ["--option", "scale_rule=rceil"]
    lines = inspected(str(tiny_policy.name), "--format", "mxfp4", *options)
    assert lines[0].split()[:2] == ["layer", "shape"]
    assert len(lines) == 1 + 14 + 1 + 1
    name, shape, sqnr, relative, *_ = lines[1].split()
    weight = tiny_policy.build().get_parameter(f"{name}.weight")
    error = quantization_error(weight, get_format("mxfp4", scale_rule="rceil"))
    assert shape == "x".join(map(str, weight.shape))
    assert (sqnr, relative) == (f"{error.sqnr_db:.2f}", f"{error.relative_error:.4f}")
    assert lines[-2].startswith("all ")
    (picture,) = here.iterdir()
    assert lines[-1] == f"figure  {picture.name}"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_figure_goes_where_it_is_asked_to(here, tiny_policy):
    two_dimensional = ["--option", "block=[16, 16]"]
    inspected(str(tiny_policy.name), "-f", "nvfp4", *two_dimensional, "--figure", "x.svg")
    assert [file.name for file in here.iterdir()] == ["x.svg"]


def test_a_checkpoint_of_a_run(here, tiny_policy, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    fit = ["fit", "-r", "base", f"policy.name={tiny_policy.name}", "trainer.max_steps=2", *SMALL]
    fit += ["callbacks.checkpoint.every_n_epochs=1", "callbacks.held_out_evaluation=null"]
    assert CliRunner().invoke(app, fit).exit_code == 0
    (checkpoint, *_) = here.rglob("*.ckpt")
    saved = torch.load(checkpoint, weights_only=True)
    weight = saved["state_dict"]["model.model.layers.0.self_attn.q_proj.weight"]
    weight[:, ::2] *= 100  # unlike the policy that the run began with
    torch.save(saved, checkpoint)
    lines = inspected(str(checkpoint), "-f", "nvfp4")
    error = quantization_error(weight, get_format("nvfp4"))
    assert lines[1].split()[2] == f"{error.sqnr_db:.2f}"
    folder = checkpoint.parent.parent
    assert inspected(str(folder), "-f", "nvfp4")[:-1] == lines[:-1]  # its newest checkpoint
    before = inspected(str(tiny_policy.name), "-f", "nvfp4")
    assert before[1] != lines[1]
    assert before[2:-2] == lines[2:-2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["embedded", "-f", "nvfp5"], "--format, --option: unknown number format 'nvfp5'"),
        (["embedded", "-f", "nvfp4", "--option", "outer=row"], "nvfp4 has no option 'outer'"),
        (["embedded", "-f", "nvfp4", "--option", "outer_scale"], "write key=value"),
        (["embedded", "-f", "nvfp4", "--option", "outer_scale=["], "the value is no YAML"),
        (["embedded", "-f", "nvfp4", "--option", "outer_scale=[1]"], "--format, --option: "),
        (["embedded", "-f", "nvfp4", "--figure", "x.txt"], "its name must end in .png"),
        (["embedded", "-f", "nvfp4", "--figure", "no/x.png"], "there is no folder no"),
        (["./nothing", "-f", "nvfp4"], "policy ./nothing: there is no such folder"),
        (["nothing.ckpt", "-f", "nvfp4"], "checkpoint nothing.ckpt: there is no such file"),
    ],
)
def test_bad_input_is_one_line(here, monkeypatch, capfd, arguments, says):
    from lightning_qrl import cli

    monkeypatch.setattr(sys, "argv", ["qrl", "inspect", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out, err = capfd.readouterr()
    assert end.value.code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert says in line
    assert not [*here.iterdir()]
