"""`qrl sensitivity`: what it measures, prints, draws and writes."""

import sys

import pytest
import torch
from typer.testing import CliRunner

from lightning_qrl.build import build
from lightning_qrl.cli import app
from lightning_qrl.launch import rehearse
from lightning_qrl.launch.sensitivity import Variants, prepare
from lightning_qrl.precision.plan import PrecisionPlan
from lightning_qrl.precision.resolve import BF16
from lightning_qrl.recipe import load_recipe

BARE = ["bf16_tail", "sensitive_weights"]
WITHOUT = [part for key in BARE for part in ("--without", key)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tiny(tiny_policy):
    return f"policy.name={tiny_policy.name}"


def measured(*arguments: str) -> list[str]:
    command = ["sensitivity", "-r", *arguments, "--completions", "8"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout.splitlines()


def test_the_cost_is_that_of_the_layers_in_question(tiny):
    """Against models of their own, under plans made layer by layer."""
    run = build(load_recipe("4bitter", [tiny], BARE))
    rows = [row for row in rehearse(run).table() if row.quantized]
    variants = Variants(run, rows)
    batch = variants.sample(6, 0)
    assert len(batch) == 6
    measure = variants.measure(batch)

    def logprobs_BS(quantized):
        model, plan = run.module.policy.build().eval(), PrecisionPlan()
        for row in rows:
            use = row.train if row.layer in quantized else BF16
            plan.quantize(row.layer, by="test", weight=use.weight, activation=use.activation)
        plan.commit(model)
        with torch.no_grad():
            logits_BSV = model(input_ids=batch.input_ids_BT[:, :-1], use_cache=False).logits
        chosen_BS1 = logits_BSV.log_softmax(-1).gather(-1, batch.input_ids_BT[:, 1:, None])
        return chosen_BS1[..., 0].where(batch.mask_BS, 0).double()

    everything = frozenset(row.layer for row in rows)
    some = frozenset(layer for layer in everything if "layers.1.mlp" in layer)
    for quantized in (everything, some, frozenset()):  # one after another, on one model
        expected_B = (logprobs_BS(quantized) - logprobs_BS(frozenset())).abs().sum(dim=1)
        assert measure(quantized).numpy() == pytest.approx(expected_B.numpy(), rel=1e-4, abs=1e-5)
        assert bool(expected_B.sum() > 0) == bool(quantized)


def test_bytes_are_those_of_the_format(tiny):
    sensitivity, _ = prepare(load_recipe("mxfp8", [tiny]), 4)
    mlp = next(cost for cost in sensitivity.rank() if cost.name == "mlp")
    weights = 2 * 3 * 32 * 64
    assert mlp.quantized_bytes == weights * 8.25 / 8
    assert mlp.quantized_bytes + mlp.extra_bytes == weights * 2


def test_what_it_prints_draws_and_writes(here, tiny):
    lines = measured("4bitter", tiny, *WITHOUT, "--target", "0.4", "--write", "spared.yaml")
    assert lines[0].startswith("recipe 4bitter: mean |Δlogprob| ")
    assert sum(line.startswith("attention ") for line in lines) == 1
    assert any("sparing the " in line and "first 15%" in line for line in lines)
    assert lines[-1] == "recipe  spared.yaml"
    assert (here / "sensitivity-4bitter.png").read_bytes().startswith(b"\x89PNG")

    written = load_recipe("spared.yaml")
    chosen = next(line for line in lines if line.startswith("chosen")).split(" in BF16")[0]
    spared = {row.layer for row in rehearse(build(written)).table() if row.kept_by}
    sensitivity, groups = prepare(load_recipe("4bitter", [tiny], BARE), 8)
    names = chosen.removeprefix("chosen  ").split(", ")
    assert spared == frozenset().union(*(g.layers for g in groups if g.name in names))
    saved = sensitivity.saved(frozenset(spared)).value
    assert saved >= 0.4 * sensitivity.cost(sensitivity.everything).value
    # The rest is the recipe as it was measured.
    bare = load_recipe("4bitter", [tiny], BARE).values
    assert written.values["policy"] == bare["policy"]
    assert written.values["callbacks"].keys() == {*bare["callbacks"], "sensitive_weights"}


def test_a_written_recipe_adds_to_what_the_recipe_keeps(here, tiny):
    (here / "own").mkdir()
    (here / "mine.yaml").write_text("extends: 4bitter\ncallbacks: {bf16_tail: null}\n")
    measured("mine.yaml", tiny, "--write", "own/more.yaml", "--figure", "x.pdf")
    select = load_recipe("own/more.yaml").values["callbacks"]["sensitive_weights"]["select"]
    assert select[0] == "attention"
    assert len(select) > 1
    assert not (here / "sensitivity-mine.png").exists()


def test_the_seed_of_the_recipe_decides(tiny):
    assert measured("4bitter", tiny, *WITHOUT) == measured("4bitter", tiny, *WITHOUT)
    assert measured("4bitter", tiny, *WITHOUT) != measured("4bitter", tiny, "seed=1", *WITHOUT)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-r", "base"], "recipe base quantizes no layer below 16 bits"),
        (["-r", "bf16"], "recipe bf16 quantizes no layer below 16 bits"),
        (["-r", "4biter"], "did you mean 4bitter"),
        (["-r", "4bitter", "--target", "0"], "--target must be above 0"),
        (["-r", "4bitter", "--target", "1.5"], "--target must be above 0"),
        (["-r", "4bitter", "--completions", "1"], "--completions must be at least 2"),
        (["-r", "4bitter", "--without", "nothing"], "--without nothing: no such callback"),
        (["-r", "4bitter", "--write", "taken.yaml"], "taken.yaml is there already"),
        (["-r", "4bitter", "--write", "no/x.yaml"], "there is no folder no"),
        (["-r", "4bitter", "--write", "x.txt"], "the name of a recipe ends in .yaml"),
        (["-r", "4bitter", "--figure", "x.doc"], "its name must end in .png"),
    ],
)
def test_bad_input_is_one_line(here, monkeypatch, capfd, arguments, says):
    from lightning_qrl import cli

    (here / "taken.yaml").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["qrl", "sensitivity", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out, err = capfd.readouterr()
    assert end.value.code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert says in line
    assert [file.name for file in here.iterdir()] == ["taken.yaml"]
    assert (here / "taken.yaml").read_text() == "mine"
