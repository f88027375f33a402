"""FP32 head: against float64 in trainer and sampler, tied, harmless in FP32, refused."""

from functools import partial

import lightning as L
import pytest
import torch
from grpo_parts import data_of, module_of

from callbacks.forward_quantization import ForwardQuantization
from callbacks.fp16 import FP16
from callbacks.fp32_lm_head import FP32LmHead
from callbacks.sensitive_weights import SensitiveWeights
from lightning_qrl.build import build
from lightning_qrl.errors import UserError
from lightning_qrl.launch import rehearse
from lightning_qrl.policy import Policy
from lightning_qrl.precision.full import FP32
from lightning_qrl.recipe import load_recipe
from lightning_qrl.reports.plan import plan_columns


class Heads(L.Callback):
    """Keeps what the head reads and gives: (sampling, logits' dtype, largest relative error)."""

    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer, pl_module):
        head, switch = pl_module.model.lm_head, pl_module.plan._switch

        def see(module, inputs, logits):
            exact = inputs[0].detach().double() @ module.weight.detach().double().T
            error = float((logits.detach() - exact).abs().max() / exact.abs().max())
            self.seen.append((switch.current == "rollout", logits.dtype, error))

        head.register_forward_hook(see)

    def dtypes(self):
        return {(sampling, dtype) for sampling, dtype, _ in self.seen}


def test_logits_are_those_of_float64_on_both_sides(train):
    for callbacks, dtype, low, high in (
        ([], torch.bfloat16, 1e-3, 1e-1),
        ([FP32LmHead()], torch.float32, 0, 1e-6),
    ):
        heads = Heads()
        train(2, *callbacks, heads, precision="bf16-mixed")
        assert heads.dtypes() == {(False, dtype), (True, dtype)}
        errors = [error for *_, error in heads.seen]
        assert low <= max(errors) < high


@pytest.mark.slow
def test_sampler_and_trainer_differ_less(tmp_path):
    """k3 of 256 completions of the embedded policy; what is left is the hidden states' rounding."""
    found = []
    for given in ([], ["callbacks.fp32_lm_head={}"]):
        overrides = [*given, "trainer.precision=bf16-mixed", "trainer.max_steps=2"]
        others = ["checkpoint", "held_out_evaluation", "live_view", "sampled_completions"]
        run = build(load_recipe("base", overrides, others))
        L.seed_everything(0, verbose=False)
        trainer = L.Trainer(
            **run.trainer_args,
            callbacks=list(run.callbacks.values()),
            logger=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(run.module, run.data)
        found.append(float(trainer.callback_metrics["rollout_corr/k3_kl"]))
    without, with_it = found
    assert 0 < with_it < without


def test_a_tied_head_stays_tied_and_its_gradient_is_fp32(save_policy, tmp_path, parity, fit):
    save_policy(tmp_path, tie_word_embeddings=True)
    policy = Policy(str(tmp_path))
    gradients = []

    class Gradients(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            gradients.append(pl_module.model.lm_head.weight.grad.clone())

    module, callbacks = module_of(policy, parity), [FP32LmHead(), Gradients()]
    fit(module, data_of(parity), 1, callbacks=callbacks, precision="bf16-mixed")
    model = module.model
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert gradients[0].dtype == torch.float32
    assert gradients[0].any()
    assert model.state_dict().keys() == policy.build().state_dict().keys()
    [row] = [row for row in module.plan.table() if row.layer == "lm_head"]
    assert (row.kept_by, row.note) == (("fp32_lm_head",), "weight tied to the embedding")


@pytest.mark.parametrize("stack", [[], [partial(ForwardQuantization, "nvfp4")], [FP16]])
def test_in_fp32_no_bit_changes(train, stack):
    plain = train(2, *(make() for make in stack)).state_dict()
    module = train(2, FP32LmHead(), *(make() for make in stack))
    assert all(plain[name].equal(tensor) for name, tensor in module.state_dict().items())
    [row] = [row for row in module.plan.table() if row.kept_by]
    assert row.train == row.rollout == FP32


def test_the_table_says_so():
    plan = rehearse(build(load_recipe("base", ["callbacks.fp32_lm_head={}"])))
    columns = plan_columns(plan.table())
    at = columns["layer"].index("lm_head")
    cells = [columns[name][at] for name in ("weight", "activation", "backward", "kept by")]
    assert cells == ["fp32", "fp32", "fp32", "fp32_lm_head"]
    assert plan.summary() == "none of 57 linears below 16 bits, 1 kept by fp32_lm_head"
    assert plan.count_kept() == 57


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        (ForwardQuantization("nvfp4", where="lm_head"),
         "fp32_lm_head keeps lm_head in fp32, and forward_quantization asks for nvfp4; remove one"),
        (ForwardQuantization("nvfp4", where="lm_head", side="rollout"),
         "fp32_lm_head keeps lm_head in fp32, and forward_quantization asks for nvfp4; remove one"),
        (SensitiveWeights(["lm_head"]),
         "fp32_lm_head and sensitive_weights disagree on the keep of lm_head .* fp32 or bf16"),
    ],
)  # fmt: skip
def test_another_precision_of_the_head_is_refused(callback, says):
    for order in (1, -1):
        run = build(load_recipe("base", ["callbacks.fp32_lm_head={}"]))
        given = [*run.callbacks.items(), ("other", callback)][::order]
        run.callbacks.clear()
        run.callbacks.update(given)
        with pytest.raises(UserError, match=says):
            rehearse(run)


def test_another_name_of_the_head_is_suggested():
    recipe = load_recipe("base", ["callbacks.fp32_lm_head={where: head}"])
    with pytest.raises(UserError, match="fp32_lm_head: .*'head'.*did you mean 'lm_head'"):
        rehearse(build(recipe))


def test_an_engine_with_a_head_of_its_own_is_refused():
    run = build(load_recipe("base", ["callbacks.fp32_lm_head={}", "policy.init=random"]))
    run.module.engine.follows_plan = False
    with pytest.raises(UserError, match="fp32_lm_head: engine Embedded samples with a head of its"):
        run.callbacks["fp32_lm_head"].setup(L.Trainer(accelerator="cpu"), run.module, "fit")
