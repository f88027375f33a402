"""Training on old samples, replayed by hand: every version's weights are kept, in float64."""

import math
from collections import Counter

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_qrl.asynchrony.settings import Asynchrony
from lightning_qrl.seeding import derive_seed
from tests.helpers.grpo_parts import NEW, G, P, Watched, data_of, module_of

SPREAD = {"completion_time": 1.0, "completion_time_spread": 0.8, "samplers": 4}
SETTINGS = {
    "one behind": ({"max_staleness": 1}, {}),
    "two behind": ({"max_staleness": 2}, {}),
    "two updates": (
        {"max_staleness": 4, "queue_depth": 1, "weight_sync_every": 2},
        {"minibatches": 2},
    ),
    "late": ({"max_staleness": 3, "queue_depth": 2, **SPREAD}, {}),
    "in flight": ({"max_staleness": 3, "queue_depth": 1, "in_flight_update": True, **SPREAD}, {}),
}
each_setting = pytest.mark.parametrize("name", SETTINGS)
STEPS = 7


class Kept(Watched):
    copies = True


def run(policy, task, fit, knobs, numbers, steps=STEPS, cls=Watched, **settings):
    module = module_of(policy, task, cls)
    data = data_of(task, asynchrony=Asynchrony(**knobs), **numbers)
    fit(module, data, steps, **settings)
    return module, data


def exact_logprobs(model, experience):
    """Log-probabilities of every token under a float64 model, [B, S]."""
    ids_BT = experience.input_ids_BT  # padding comes last, where no token attends to it
    with torch.no_grad():
        logprobs = model(input_ids=ids_BT[:, :-1]).logits.log_softmax(-1)
    return logprobs.gather(2, ids_BT[:, 1:, None])[..., 0]


@each_setting
def test_each_token_is_of_the_version_that_it_says(tiny_policy, parity, fit, recorder, name):
    knobs, numbers = SETTINGS[name]
    module, _ = run(tiny_policy, parity, fit, knobs, numbers, cls=Kept, logger=recorder)
    weights, several = [model for _, model in module.seen], 0
    for now, ((batch, model), logged) in enumerate(zip(module.seen, recorder.steps, strict=True)):
        mask, versions = batch.mask_BS, batch.versions_BS
        trainer, sampler = exact_logprobs(model, batch), torch.zeros_like(mask, dtype=torch.float64)
        for version in versions[mask].unique().tolist():
            own = mask & (versions == version)
            sampler[own] = exact_logprobs(weights[version], batch)[own]
        off = (batch.logprobs_BS - sampler)[mask].abs().max()
        assert off < 2e-5, f"step {now}: off by {off}"
        several += sum(len(row[m].unique()) > 1 for row, m in zip(versions, mask, strict=True))
        check_metrics(logged, (trainer - sampler)[mask], (now - versions)[mask].tolist())
    assert (several > 0) == (name == "in flight")
    oldest = max(step["async/staleness_max"] for step in recorder.steps)
    assert oldest == knobs["max_staleness"] + (numbers.get("minibatches", 1) - 1)


def check_metrics(logged, d, ages):
    """Ratio, KL and staleness of a step, from differences in float64 and ages of its tokens."""
    count = Counter(ages)
    k3 = (d.exp() - d - 1).tolist()
    want = {
        "train/sampling/importance_sampling_ratio/mean": float(d.exp().mean()),
        "train/sampling/importance_sampling_ratio/max": float(d.exp().max()),
        "rollout_corr/kl": -float(d.mean()),
        "rollout_corr/k3_kl": sum(k3) / len(k3),
        "async/staleness_mean": sum(ages) / len(ages),
        "async/staleness_max": max(ages),
    }
    for age in count:
        of_age = [k for k, a in zip(k3, ages, strict=True) if a == age]
        want[f"async/staleness/lag_{age}"] = count[age] / len(ages)
        want[f"async/k3_kl/lag_{age}"] = sum(of_age) / len(of_age)
    got = {name: logged[name] for name in want}
    assert got == pytest.approx(want, rel=1e-3, abs=1e-5)
    shares = [value for name, value in logged.items() if name.startswith("async/staleness/")]
    assert math.isclose(sum(shares), 1.0, abs_tol=1e-6)
    shown = {name for name in logged if name.startswith("async/k3_kl/")}
    assert shown == {f"async/k3_kl/lag_{age}" for age in count}


@pytest.mark.parametrize("behind", [1, 2])
def test_a_constant_lag(tiny_policy, parity, fit, recorder, behind):
    module, _ = run(tiny_policy, parity, fit, {"max_staleness": behind}, {}, logger=recorder)
    ages = [step["async/staleness_mean"] for step in recorder.steps]
    assert ages == [min(step, behind) for step in range(STEPS)]
    assert [s["async/queue_size"] for s in recorder.steps] == [P] + [behind * P] * (STEPS - 1)
    # the prompts come in the order of the synchronous trainer
    together, _ = run(tiny_policy, parity, fit, {}, {})
    for late, now in zip(module.rollouts, together.rollouts, strict=True):
        assert torch.equal(first_prompts(late), first_prompts(now))


def first_prompts(experience):
    lengths = experience.prompt_length_B
    return torch.cat([ids[:n] for ids, n in zip(experience.input_ids_BT, lengths, strict=True)])


def test_staleness_zero_is_the_trainer_without_any_asynchrony(tiny_policy, parity, fit, recorder):
    module, data = run(tiny_policy, parity, fit, {"max_staleness": 0}, {}, 3, Kept, logger=recorder)
    assert data.state_dict() == {}
    assert [s["async/discarded"] + s["async/queue_size"] for s in recorder.steps] == [0, 0, 0]
    assert [s["async/staleness/lag_0"] for s in recorder.steps] == [1, 1, 1]
    # each rollout again, by hand: the weights before the step, and the engine alone
    for phase, (rollout, (_, model)) in enumerate(zip(module.rollouts, module.seen, strict=True)):
        again = module_of(tiny_policy, parity)
        again.configure_model()
        again.model.load_state_dict(model.float().state_dict())
        ids = [tiny_policy.encode(prompt.text) for prompt in data.phase_prompts(phase)]
        again.engine.sync(again.model, phase)
        seed = derive_seed(0, "rollout", phase, 0)
        sampled = again.engine.generate(ids, samples=G, seed=seed)
        got = rollout.logprobs_BS[rollout.mask_BS]
        assert torch.equal(got, torch.cat([c.logprobs_N for c in sampled]))


@pytest.mark.parametrize("name", ["two behind", "in flight"])
def test_a_resumed_run_equals_one_that_was_not_interrupted(
    tmp_path, tiny_policy, parity, fit, name
):
    knobs, numbers = SETTINGS[name]
    saver = ModelCheckpoint(
        tmp_path, filename="{step}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True
    )
    whole, _ = run(
        tiny_policy, parity, fit, knobs, numbers, 6, callbacks=[saver], enable_checkpointing=True
    )
    resumed, _ = run(
        tiny_policy, parity, fit, knobs, numbers, 6, ckpt_path=tmp_path / "step=3.ckpt"
    )
    assert len(resumed.rollouts) == 3
    for again, once in zip(resumed.rollouts, whole.rollouts[3:], strict=True):
        for field in ("input_ids_BT", "logprobs_BS", "versions_BS", "rewards_B", "truncated_B"):
            assert torch.equal(getattr(again, field), getattr(once, field)), field
    for key, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], value), key


def test_discarded_groups_are_counted_and_never_sampled(tiny_policy, parity, fit, recorder):
    class Counting(Watched):
        asked = 0

        def sample(self, prompts, samples, seed, **options):
            self.asked += len(prompts) * samples
            return super().sample(prompts, samples, seed, **options)

    knobs = {"max_staleness": 1, "queue_depth": 3, **SPREAD}
    module, data = run(tiny_policy, parity, fit, knobs, {}, 12, Counting, logger=recorder)
    assert sum(step["async/discarded"] for step in recorder.steps) > 0
    assert max(step["async/staleness_max"] for step in recorder.steps) == 1
    waiting = sum(len(group) for group in data._pipeline._held.values())
    assert module.asked == 12 * P * G + waiting
    lengths = [int(r.mask_BS.sum(1).max()) for r in module.rollouts]
    assert max(lengths) <= NEW
