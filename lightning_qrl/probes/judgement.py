"""The known answers, each a check of what came of a trial."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lightning_qrl.probes.oracle import Oracle
from lightning_qrl.probes.policies import VOCABULARY
from lightning_qrl.probes.trial import Rollout, Trial, Weights

ROUNDING = 1e-4  # of FP32 against float64, relative; a hundred times what was measured
LIKELY = 0.95  # a probability that has gone to 1
DRIFT = 0.1  # of a probability without a reason to move; by chance up to 0.045 in 29 seeds


@dataclass(frozen=True, slots=True)
class Check:
    """A known answer, and what came.

    Attributes:
        what: the known answer.
        found: what came.
        passed: whether they agree.
    """

    what: str
    found: str
    passed: bool


Judge = Callable[[Trial], Check]


def no_gradient(trial: Trial) -> Check:
    """The gradient of every update is 0, not nearly."""
    largest = max(
        float(g.abs().max()) for update in trial.updates for g in update.gradient.values()
    )
    return Check("every gradient is exactly 0", f"up to {largest:.1e}", largest == 0)


def no_movement(trial: Trial) -> Check:
    """Every weight is what it was, bit for bit."""
    before = trial.updates[0].weights
    moved = sum(not torch.equal(before[name], weight) for name, weight in trial.weights.items())
    return Check("no weight moves", f"{moved} of {len(before)} tensors moved", not moved)


def all_groups_equal(trial: Trial) -> Check:
    """The metric that tells a user about it is 1."""
    name = "train/frac_reward_zero_std"
    value = trial.metrics[name]
    return Check(f"{name} is 1", f"{value:g}", value == 1)


def gradients(count: int) -> Judge:
    """The gradients of the first updates are those of the equation."""

    def judge(trial: Trial) -> Check:
        each, found, near = trial.world.iterations, [], True
        for i, update in enumerate(trial.updates[:count]):
            rollout, first = trial.rollouts[i // each], trial.updates[i // each * each]
            sampler = _oracle(trial, first.weights)
            expected = _oracle(trial, update.weights).gradient(rollout, sampler)
            said, off = _difference(update.gradient, expected)
            found.append(said)
            near &= off <= ROUNDING
        which = "the first gradient" if count == 1 else f"the first {count} gradients"
        return Check(f"{which} as in float64", "; ".join(found), near)

    return judge


def _difference(got: Weights, expected: Weights) -> tuple[str, float]:
    a = torch.cat([got[name].double().flatten() for name in expected])
    b = torch.cat([weight.flatten() for weight in expected.values()])
    off = float((a - b).norm() / b.norm())
    cosine = float(functional.cosine_similarity(a, b, dim=0))
    length = float(a.norm() / b.norm())
    return f"off by {off:.0e} (cosine {cosine:.3f}, length x {length:.3f})", off


def sampler_agrees(count: int) -> Judge:
    """In the first rollouts the sampler's log-probabilities are those of the policy of then.

    They are worked out from the weights that the first update on a rollout finds, without a batch,
    padding or cache.
    """

    def judge(trial: Trial) -> Check:
        first = trial.updates[:: trial.world.iterations]
        pairs = list(zip(trial.rollouts, first, strict=True))[:count]
        offs = [_off(rollout, _oracle(trial, update.weights)) for rollout, update in pairs]
        wrong = [i for i, off in enumerate(offs, start=1) if not off <= ROUNDING]  # NaN is wrong
        which = "the first rollout" if count == 1 else f"each of {len(offs)} rollouts"
        found = f"off by {max(offs):.0e}" + (f", first in rollout {wrong[0]}" if wrong else "")
        return Check(f"the sampler's log-probs in {which} as in float64", found, not wrong)

    return judge


def _off(rollout: Rollout, oracle: Oracle) -> float:
    expected = torch.cat(list(map(oracle.logprobs, rollout.prompts, rollout.said)))
    return float((torch.cat(rollout.logprobs_N) - expected).abs().max())


def all_tokens_count(trial: Trial) -> Check:
    """Every sampled token has been trained on, and nothing else, in each update on its rollout."""
    sampled = sum(len(said) for rollout in trial.rollouts for said in rollout.said)
    expected, counted = sampled * trial.world.iterations, trial.metrics["train/num_tokens"]
    return Check("every sampled token counts", f"{counted:g} of {expected}", counted == expected)


def learns(prompt: str, answer: str) -> Judge:
    """The policy comes to give the answer to a prompt."""

    def judge(trial: Trial) -> Check:
        token = VOCABULARY.index(answer)
        before, after = (float(next_V[token]) for next_V in _before_and_after(trial, prompt))
        what = f"p({answer} | {prompt}) goes to 1"
        return Check(what, f"{before:.3f} -> {after:.3f}", after >= LIKELY)

    return judge


def stays(prefix: str) -> Judge:
    """What the policy says after a prefix stays what it was."""

    def judge(trial: Trial) -> Check:
        before_V, after_V = _before_and_after(trial, prefix)
        off = float((after_V - before_V).abs().max())
        return Check(f"p(. | {prefix}) stays", f"off by {off:.3f}", off <= DRIFT)

    return judge


def _before_and_after(trial: Trial, prefix: str) -> tuple[Tensor, Tensor]:
    """Probabilities of the token after a prefix, float64 [V]."""
    ids = tuple(VOCABULARY.index(character) for character in prefix)
    before, after = (
        _oracle(trial, weights).next_token(ids)
        for weights in (trial.updates[0].weights, trial.weights)
    )
    return before, after


def _oracle(trial: Trial, weights: Weights) -> Oracle:
    return Oracle(trial.policy, weights, trial.world.temperature)
