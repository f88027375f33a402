"""Each loss, value and gradient, against its paper's equation in float64, token by token.

An equation here is a function of two policies: `pi` is differentiated, `sg` is the same one where
the paper stops the gradient. Its gradient is taken by central differences, so nothing is derived
by hand and nothing is shared with the losses.
"""

from copy import deepcopy
from dataclasses import dataclass
from math import exp, prod

import pytest
import torch

from lightning_qrl.metrics import Tally
from lightning_qrl.plugins import load_plugin


@dataclass
class Batch:
    """What the equations speak of, as Python floats: o[i] are the tokens of completion i."""

    o: dict[int, list[int]]
    old: list[list[float]]
    teacher: list[list[float]]
    advantage: list[float]
    limit: int

    @property
    def tokens(self):
        return sum(map(len, self.o.values()))


def batch_from(e):
    o = {i: [t for t, m in enumerate(row) if m] for i, row in enumerate(e.mask_BS.tolist())}
    return Batch(
        {i: tokens for i, tokens in o.items() if tokens},
        e.logprobs_BS.tolist(),
        e.reference_BS.tolist(),
        e.advantages_B.tolist(),
        e.max_new_tokens,
    )


def rho(b, pi, i, t):
    return exp(pi[i][t]) / exp(b.old[i][t])


def clipped(x, a, low, high):
    return min(x * a, min(max(x, 1 - low), 1 + high) * a)


def clipped_sum(b, pi, i, low, high):
    return sum(clipped(rho(b, pi, i, t), b.advantage[i], low, high) for t in b.o[i])


def grpo(b, pi, sg, clip_low=0.2, clip_high=0.2):
    means = [clipped_sum(b, pi, i, clip_low, clip_high) / len(b.o[i]) for i in b.o]
    return -sum(means) / len(b.o)


def bnpo(b, pi, sg, clip_low=0.2, clip_high=0.2):
    return -sum(clipped_sum(b, pi, i, clip_low, clip_high) for i in b.o) / b.tokens


def dapo(b, pi, sg, clip_low=0.2, clip_high=0.28):
    return -sum(clipped_sum(b, pi, i, clip_low, clip_high) for i in b.o) / b.tokens


def dr_grpo(b, pi, sg, clip_low=0.2, clip_high=0.2):
    sums = [clipped_sum(b, pi, i, clip_low, clip_high) / b.limit for i in b.o]
    return -sum(sums) / len(b.o)


def gspo_ratio(b, pi, i):
    likelihood, before = (prod(exp(p[i][t]) for t in b.o[i]) for p in (pi, b.old))
    return (likelihood / before) ** (1 / len(b.o[i]))


def gspo(b, pi, sg, clip_low=3e-4, clip_high=4e-4):
    each = [clipped(gspo_ratio(b, pi, i), b.advantage[i], clip_low, clip_high) for i in b.o]
    return -sum(each) / len(b.o)


def gspo_token(b, pi, sg, clip_low=3e-4, clip_high=4e-4):
    total = 0.0
    for i in b.o:
        s = [gspo_ratio(b, sg, i) * exp(pi[i][t]) / exp(sg[i][t]) for t in b.o[i]]
        each = [clipped(s_t, b.advantage[i], clip_low, clip_high) for s_t in s]
        total += sum(each) / len(b.o[i])
    return -total / len(b.o)


def cispo(b, pi, sg, clip_high=4.0):
    each = [
        min(rho(b, sg, i, t), 1 + clip_high) * b.advantage[i] * pi[i][t]
        for i in b.o
        for t in b.o[i]
    ]
    return -sum(each) / b.tokens


def sapo(b, pi, sg, temperature_pos=1.0, temperature_neg=1.05):
    total = 0.0
    for i in b.o:
        tau = temperature_pos if b.advantage[i] > 0 else temperature_neg
        gates = [4 / tau / (1 + exp(-tau * (rho(b, pi, i, t) - 1))) for t in b.o[i]]
        total += sum(gates) / len(b.o[i]) * b.advantage[i]
    return -total / len(b.o)


def reinforce(b, pi, sg):
    return -sum(b.advantage[i] * sum(pi[i][t] for t in b.o[i]) for i in b.o) / len(b.o)


def distill(b, pi, sg, coef=1.0):
    total = 0.0
    for i in b.o:
        for t in b.o[i]:
            advantage = -coef * (b.old[i][t] - b.teacher[i][t])
            total += rho(b, pi, i, t) * advantage
    return -total / b.tokens


def slope(equation, b, pi, options, shape, h=1e-6):
    gradient, moved = torch.zeros(shape, dtype=torch.float64), deepcopy(pi)
    for i in b.o:
        for t in b.o[i]:
            sides = []
            for step in (h, -h):
                moved[i][t] = pi[i][t] + step
                sides.append(equation(b, moved, pi, **options))
            moved[i][t] = pi[i][t]
            gradient[i, t] = (sides[0] - sides[1]) / (2 * h)
    return gradient


WIDE = {"clip_low": 0.5, "clip_high": 0.1}
CASES = [
    (equation, options)
    for equation, *several in [
        (grpo, {}, WIDE),
        (bnpo, {}, WIDE),
        (dr_grpo, {}, WIDE),
        (dapo, {}, WIDE),
        (gspo, {}, WIDE),
        (gspo_token, {}, WIDE),
        (cispo, {}, {"clip_high": 0.2}),
        (sapo, {}, {"temperature_pos": 0.5, "temperature_neg": 3.0}),
        (reinforce, {}),
        (distill, {}, {"coef": 0.3}),
    ]
    for options in several
]


@pytest.mark.parametrize("truncated_count", [True, False])
@pytest.mark.parametrize("spread", [0.05, 2.0])
@pytest.mark.parametrize(("equation", "options"), CASES, ids=lambda x: getattr(x, "__name__", None))
def test_value_and_gradient(equation, options, spread, truncated_count, off_policy):
    tally = Tally()
    for seed in range(3):
        logprobs, e = off_policy(seed, spread, rows=16)
        if not truncated_count:
            assert e.truncated_B.any()
            e = e.where(~e.truncated_B)
        loss = load_plugin("lightning_qrl.losses", equation.__name__)(**options)
        value, metrics = loss(logprobs, e)
        value.backward()
        tally.add(metrics)
        b, pi = batch_from(e), logprobs.double().tolist()
        want = slope(equation, b, pi, options, logprobs.shape)
        assert want.any()
        assert float(value.detach()) == pytest.approx(equation(b, pi, pi, **options), 1e-5, 1e-6)
        torch.testing.assert_close(logprobs.grad.double(), want, rtol=1e-5, atol=1e-6)
    if spread > 1:  # every branch of a clip was taken
        shares = {k: v for k, v in tally.flush().items() if k.startswith(("clip_ratio", "cispo"))}
        assert all(share > 0 for name, share in shares.items() if name.endswith(("mean", "ratio")))
