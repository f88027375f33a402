"""What float64 says of a policy, one sequence at a time: no padding, no cache, no batch.

The gradient of the policy loss over a rollout of N sampled tokens is, at the logits z of each
token, that of a softmax bandit,

    dL/dz = - c / N (onehot(token) - softmax(z)),    c = 0 where the clip holds, else rho A,

and the chain rule carries it to the weights. A is the reward less the mean of its group, over the
group's standard deviation (ddof 1) + 1e-4; rho is pi(token) over the pi that sampled it.

M tokens of a completion, V vocabulary.
"""

import statistics

import torch
from torch import Tensor
from torch.nn import functional

from lightning_qrl.policy import Policy
from lightning_qrl.probes.trial import Rollout, Tokens, Weights

CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # as `GRPOModule` has them
EPSILON = 1e-4


class Oracle:
    """A policy in float64 on the CPU.

    Args:
        policy: builds the model.
        weights: its weights.
        temperature: divides the logits, in sampling and so in training.
    """

    def __init__(self, policy: Policy, weights: Weights, temperature: float = 1.0) -> None:
        self.model = policy.build().double().eval()
        self.model.load_state_dict(weights)
        self.temperature = temperature
        self._logprobs: dict[tuple[Tokens, Tokens], Tensor] = {}

    def logits(self, prompt: Tokens, tokens: Tokens) -> Tensor:
        """Logits by the temperature, of the tokens after a prompt, float64 [M, V]."""
        ids_1T = torch.tensor([[*prompt, *tokens]])
        logits_TV: Tensor = self.model(input_ids=ids_1T, use_cache=False).logits[0]
        return logits_TV[len(prompt) - 1 : -1] / self.temperature

    @torch.no_grad()
    def logprobs(self, prompt: Tokens, tokens: Tokens) -> Tensor:
        """Log-probabilities of the tokens after a prompt, float64 [M]; worked out once."""
        key = prompt, tokens
        if key not in self._logprobs:
            logprobs_MV = self.logits(prompt, tokens).log_softmax(dim=-1)
            self._logprobs[key] = logprobs_MV.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        return self._logprobs[key]

    @torch.no_grad()
    def next_token(self, prompt: Tokens) -> Tensor:
        """Probabilities of the token after a prompt, float64 [V]."""
        return self.logits(prompt, (0,))[0].softmax(dim=-1)

    def gradient(self, rollout: Rollout, sampler: "Oracle") -> Weights:
        """The gradient of the loss over a rollout that `sampler` has written, by weight."""
        coefficients: dict[tuple[Tokens, Tokens], Tensor] = {}
        for prompt, said, advantage in zip(
            rollout.prompts, rollout.said, advantages(rollout), strict=True
        ):
            ratio_M = (self.logprobs(prompt, said) - sampler.logprobs(prompt, said)).exp()
            clipped_M = ratio_M > 1 + CLIP_HIGH if advantage > 0 else ratio_M < 1 - CLIP_LOW
            c_M = (ratio_M * advantage).masked_fill(clipped_M, 0.0)
            coefficients[prompt, said] = coefficients.get((prompt, said), 0.0) + c_M
        self.model.zero_grad()
        total = sum(map(len, rollout.said))
        for (prompt, said), c_M in coefficients.items():
            logits_MV = self.logits(prompt, said)
            onehot_MV = functional.one_hot(torch.tensor(said), logits_MV.shape[-1])
            away_MV = onehot_MV - logits_MV.detach().softmax(dim=-1)
            torch.autograd.backward(logits_MV, -c_M[:, None] / total * away_MV)
        named = self.model.named_parameters()
        return {name: weight.grad for name, weight in named if weight.grad is not None}


def advantages(rollout: Rollout) -> list[float]:
    """Of each completion."""
    each: list[float] = []
    for start in range(0, len(rollout.rewards), rollout.group_size):
        group = rollout.rewards[start : start + rollout.group_size]
        mean, deviation = statistics.fmean(group), statistics.stdev(group)
        each += [(reward - mean) / (deviation + EPSILON) for reward in group]
    return each
