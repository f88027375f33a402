"""How rollouts become updates: what losses, corrections and metrics have to know of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Regime:
    """By default each rollout is trained on once, as soon as it is sampled.

    Attributes:
        updates: optimizer steps on one rollout.
        whole_groups: whether every micro-batch holds all completions of each of its prompts.
        largest_lag: versions that a token can be behind the weights that are trained.
    """

    updates: int = 1
    whole_groups: bool = True
    largest_lag: int = 0
