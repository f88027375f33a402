"""Probes: five tiny worlds whose answer is known, to tell which part of GRPO is wrong.

Andy Jones ("Debugging RL, without the agonizing pain") debugs an actor-critic in five worlds, each
of which needs one part more than the one before. Carried over to GRPO on a language model, which
has no critic:

    constant      whatever is said earns the same            no weight moves
    observation   the prompt alone decides what is earned    no weight moves
    bandit        one token, one of which earns              it goes to 1; two gradients are known
    delayed       two tokens; the first decides, at the end  it goes to 1, the second stays put
    contextual    two prompts, each with its own answer      both go to 1

Jones has delayed reward third, to test the discounting of a critic. Here it tests that the reward
reaches the token that earned it, which stands on a policy gradient that works: so it is fourth.
Begin with the first probe that fails; those after it stand on what it tests.

Each runs the real module, data, engine and trainer (`trial`) on a policy made in code (`policies`).
What comes of it is compared with what float64 says of the same weights and completions (`oracle`).
"""

from lightning_qrl.probes.environments import PROBES, Probe, Verdict, run_probe
from lightning_qrl.probes.judgement import Check

__all__ = ["PROBES", "Check", "Probe", "Verdict", "run_probe"]
