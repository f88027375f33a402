"""What of a rollout is trained on: mixed groups of other prompts, and high-leverage completions."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_qrl.advantages import AdvantageEstimator
from lightning_qrl.data import RolloutData
from lightning_qrl.grpo import GRPOModule
from lightning_qrl.optimizer import AdamWSettings
from lightning_qrl.rollouts.embedded import Embedded
from lightning_qrl.tasks.base import Prompt

G, P, NEW = 4, 3, 5


class HalfDead:
    """Twelve prompts; those with a 9 give every completion the same reward."""

    dead = "9"

    def prompts(self, split):
        return [Prompt(f"{'9' if i % 2 else '3'}+{i}=", "1") for i in range(12)]

    def reward(self, prompt, completion):
        return 0.5 if self.dead in prompt.text else sum(map(ord, completion)) % 7 / 7

    def solved(self, reward):
        return reward == 1.0


class AllDead(HalfDead):
    dead = "="


class Watched(GRPOModule):
    """Keeps each rollout's experience, what was sampled for it, and what is trained on."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rollouts, self.sampled, self.seen, self.unmixed = [], [], [], []

    def sample(self, prompts, samples, seed):
        self.sampled.append((self.global_step, [p.text for p in prompts]))
        return super().sample(prompts, samples, seed)

    def judge(self, prompts, completions, split):
        rewards_B = super().judge(prompts, completions, split)
        self.unmixed.append((self.global_step, mixed(rewards_B).count(False)))
        return rewards_B

    def collect(self, prompts, phase, spares=()):
        experience = super().collect(prompts, phase, spares)
        self.rollouts.append(experience)
        return experience

    def training_step(self, experience, batch_idx):
        self.seen.append((self.global_step, experience))
        return super().training_step(experience, batch_idx)


def make(policy, task, seed=0, **data):
    engine = Embedded(eos_id=policy.eos_id, pad_id=policy.pad_id, max_new_tokens=NEW)
    settings = AdamWSettings(lr=1e-2)
    parts = {"policy": policy, "task": task, "engine": engine, "optimizer": settings}
    module = Watched(**parts, group_size=G, seed=seed)
    options = {"group_size": G, "prompts_per_rollout": P, "seed": seed, **data}
    return module, RolloutData(task.prompts("train"), **options)


def weights(module):
    return {name: value.clone() for name, value in module.model.state_dict().items()}


def assert_same(a, b):
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def prompt_of(policy, experience, row):
    return policy.decode(experience.input_ids_BT[row, : experience.prompt_length_B[row]])


def mixed(rewards_B):
    return [len(set(group.tolist())) > 1 for group in rewards_B.view(-1, G)]


# ---- dynamic sampling ----------------------------------------------------------------------------


def test_unmixed_groups_are_replaced_by_mixed_ones_of_other_prompts(tiny_policy, fit, recorder):
    task = HalfDead()
    module, data = make(tiny_policy, task, dynamic_sampling=3)
    fit(module, data, 4, logger=recorder)
    again = whole = 0
    for number, (step, rollout) in enumerate(zip(recorder.steps, module.rollouts, strict=True)):
        assert len(rollout) == P * G
        sampled = [texts for at, texts in module.sampled if at == number]
        asked = [text for texts in sampled for text in texts]
        assert len(sampled[0]) == P
        first, *more = [equal for at, equal in module.unmixed if at == number]
        left = first
        for texts, equal in zip(sampled[1:], more, strict=True):
            assert len(texts) == left > 0  # as many as are still unmixed
            left -= len(texts) - equal
        assert left == 0 or len(sampled) == 1 + 3
        assert max(Counter(asked).values()) == 1  # no prompt twice
        again += len(more)
        groups = [prompt_of(tiny_policy, rollout, row) for row in range(0, P * G, G)]
        assert set(groups) <= set(asked)
        stay = [text for text in sampled[0] if text in groups]
        assert [text for text in groups if text in stay] == stay  # in order
        # everything that was sampled counts
        share = step["train/frac_reward_zero_std"] * len(asked)
        assert share == pytest.approx(round(share))
        assert round(share) == first + sum(more)
        assert mixed(rollout.rewards_B) == ["9" not in text for text in groups]
        whole += all(mixed(rollout.rewards_B))
        assert mixed(rollout.rewards_B).count(False) == left
    assert again > 0
    assert whole >= 2
    assert max(s["train/frac_reward_zero_std"] for s in recorder.steps) > 0


def test_advantages_follow_the_groups_into_their_new_places(tiny_policy, fit):
    module, data = make(tiny_policy, HalfDead(), dynamic_sampling=3)
    fit(module, data, 2)
    for rollout in module.rollouts:
        want = AdvantageEstimator()(rollout.rewards_B.view(P, G)).flatten()
        assert torch.equal(rollout.advantages_B, want)
        assert rollout.advantages_B.any()
        for row in range(P * G):
            prompt = prompt_of(tiny_policy, rollout, row)
            ids = rollout.input_ids_BT[row, 1:][rollout.mask_BS[row]]
            reward = HalfDead().reward(Prompt(prompt, "1"), tiny_policy.decode(ids))
            assert float(rollout.rewards_B[row]) == pytest.approx(reward)


def test_when_the_attempts_are_used_up_unmixed_groups_stay(tiny_policy, fit, recorder):
    task = AllDead()
    module, data = make(tiny_policy, task, dynamic_sampling=2)
    fit(module, data, 1, logger=recorder)
    (rollout,), (step,) = module.rollouts, recorder.steps
    assert [len(texts) for _, texts in module.sampled] == [P, P, P]
    groups = [prompt_of(tiny_policy, rollout, row) for row in range(0, P * G, G)]
    assert groups == module.sampled[0][1]
    assert step["train/frac_reward_zero_std"] == 1.0
    assert step["train/loss"] == step["train/grad_norm"] == 0.0


def test_it_ends_where_the_split_has_no_other_prompts(tiny_policy, fit):
    task = AllDead()
    module, data = make(tiny_policy, task, dynamic_sampling=9, prompts_per_rollout=5)
    fit(module, data, 1)
    asked = [text for _, texts in module.sampled for text in texts]
    assert sorted(asked) == sorted(p.text for p in task.prompts("train"))


def test_mixed_groups_are_not_sampled_again_and_0_attempts_change_nothing(tiny_policy, parity, fit):
    kept = {}
    for attempts in (0, 2):
        parity.reward = lambda prompt, completion: float(len(completion)) + len(set(completion)) / 9
        module, data = make(tiny_policy, parity, dynamic_sampling=attempts, prompts_per_rollout=2)
        fit(module, data, 2)
        assert all(all(mixed(r.rewards_B)) for r in module.rollouts)
        assert len(module.sampled) == 2
        kept[attempts] = weights(module)
    assert_same(kept[0], kept[2])


@pytest.mark.parametrize("options", [{"dynamic_sampling": 2}, {"leverage": 0.6}], ids=str)
def test_the_seed_decides_everything_and_a_resumed_run_is_the_same(
    options, tiny_policy, fit, tmp_path
):
    task = HalfDead()
    saver = ModelCheckpoint(
        tmp_path, filename="{step}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True
    )
    whole, data = make(tiny_policy, task, seed=3, **options)
    fit(whole, data, 4, callbacks=[saver], enable_checkpointing=True)
    again, data = make(tiny_policy, task, seed=3, **options)
    fit(again, data, 4)
    assert_same(weights(whole), weights(again))
    rest, data = make(tiny_policy, task, seed=3, **options)
    fit(rest, data, 4, ckpt_path=tmp_path / "step=2.ckpt")
    assert_same(weights(whole), weights(rest))
    assert rest.sampled == [(at, texts) for at, texts in whole.sampled if at >= 2]
    other, data = make(tiny_policy, task, seed=4, **options)
    fit(other, data, 1)
    assert other.sampled[0] != whole.sampled[0]


# ---- leverage ------------------------------------------------------------------------------------


def by_hand(rewards_B, share):
    """Rows by falling leverage until they hold the share, ascending; float64, group by group."""
    leverage = []
    for group in rewards_B.double().view(-1, G):
        spread = group.var(correction=0)
        leverage += [float((r - group.mean()) ** 2 / spread) if spread else 0.0 for r in group]
    order = sorted(range(len(leverage)), key=lambda i: -leverage[i])
    chosen, held = [], 0.0
    while held < share * sum(leverage) - 1e-9:
        held += leverage[order[len(chosen)]]
        chosen.append(order[len(chosen)])
    return sorted(chosen)


def test_only_the_chosen_completions_are_trained_on_with_the_advantages_of_their_group(
    tiny_policy, parity, fit
):
    module, data = make(tiny_policy, parity, leverage=0.6)
    fit(module, data, 3)
    fewer = 0
    for rollout, (_, batch) in zip(module.rollouts, module.seen, strict=True):
        chosen = by_hand(rollout.rewards_B, 0.6)
        fewer += len(chosen) < P * G
        full = AdvantageEstimator()(rollout.rewards_B.view(P, G)).flatten()
        assert torch.equal(batch.advantages_B, full[chosen])
        assert torch.equal(batch.rewards_B, rollout.rewards_B[chosen])
        assert batch.step.completions == len(chosen)
        assert batch.step.tokens == int(rollout.mask_BS[chosen].sum())
    assert fewer > 0


def test_a_leverage_of_1_trains_on_all(tiny_policy, parity, fit):
    module, data = make(tiny_policy, parity, leverage=1.0)
    fit(module, data, 1)
    assert len(module.seen[0][1]) == P * G


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("parts", [1, 3])
def test_few_completions_still_give_each_micro_batch_one(
    minibatches, parts, tiny_policy, parity, fit, recorder
):
    options = {"leverage": 0.01, "minibatches": minibatches, "micro_batches": parts}
    module, data = make(tiny_policy, parity, **options)
    steps = 2 * minibatches
    fit(module, data, steps, accumulate_grad_batches=parts, logger=recorder)
    assert len(recorder.steps) == steps
    assert all(len(batch) >= 1 for _, batch in module.seen)
    trained = sum(len(batch) for _, batch in module.seen)
    assert 2 * minibatches * parts <= trained < 2 * P * G
    assert all(step["train/grad_norm"] < float("inf") for step in recorder.steps)


def test_equal_or_missing_rewards_have_no_leverage_and_give_a_step_of_zero(
    tiny_policy, parity, fit, recorder
):
    parity.reward = lambda prompt, completion: None if "1" in prompt.text else 0.25
    module, data = make(tiny_policy, parity, leverage=0.5)
    fit(module, data, 2, logger=recorder)
    assert all(step["train/loss"] == step["train/grad_norm"] == 0.0 for step in recorder.steps)
    assert [len(batch) for _, batch in module.seen] == [1, 1]


def test_leverage_is_computed_before_truncated_completions_are_masked(tiny_policy, parity, fit):
    module, data = make(tiny_policy, parity, leverage=0.6)
    module.overlong = replace(module.overlong, mask_truncated_completions=True)
    fit(module, data, 2)
    for rollout, (_, batch) in zip(module.rollouts, module.seen, strict=True):
        chosen = by_hand(rollout.rewards_B, 0.6)
        assert torch.equal(batch.advantages_B, rollout.advantages_B[chosen])
        assert not batch.mask_BS[batch.truncated_B].any()
