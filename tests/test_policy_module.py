"""What every training module shares: weight decay follows the plan, whatever a weight is called."""

import pytest

from callbacks.forward_quantization import ForwardQuantization
from callbacks.no_decay_on_quantized import NoDecayOnQuantized
from lightning_qrl.data import RolloutData
from lightning_qrl.grpo import GRPOModule
from lightning_qrl.optimizer import AdamWSettings
from lightning_qrl.policy import Policy
from lightning_qrl.rollouts.embedded import Embedded


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_head_does_not_decay_also_where_it_goes_by_the_embeddings_name(
    tied, tmp_path, save_policy, parity, fit
):
    save_policy(tmp_path, tie_word_embeddings=tied)
    policy = Policy(str(tmp_path))
    module = GRPOModule(
        policy=policy,
        task=parity,
        engine=Embedded(eos_id=policy.eos_id, pad_id=policy.pad_id),
        optimizer=AdamWSettings(weight_decay=0.1),
        group_size=2,
    )
    data = RolloutData(parity.prompts("train"), group_size=2, prompts_per_rollout=2)
    stack = [ForwardQuantization("nvfp4", where=["linears", "lm_head"]), NoDecayOnQuantized()]
    trainer = fit(module, data, steps=1, callbacks=stack)
    decaying, exempt = (set(g["param_names"]) for g in trainer.optimizers[0].param_groups)
    assert decaying == (set() if tied else {"model.embed_tokens.weight"})
    assert ("model.embed_tokens.weight" if tied else "lm_head.weight") in exempt
