"""The five probes: a world, its known answers, and what to suspect where they do not come."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lightning_qrl.optimizer import AdamWSettings
from lightning_qrl.probes.judgement import (
    Check,
    Judge,
    all_groups_equal,
    all_tokens_count,
    gradients,
    learns,
    no_gradient,
    no_movement,
    sampler_agrees,
    stays,
)
from lightning_qrl.probes.trial import World, attempt

# An eps far above any gradient turns AdamW into plain gradient descent with step lr / eps. It moves
# a weight by its gradient, where Adam would make as much of noise as of a signal.
DESCENT = AdamWSettings(lr=1200.0, eps=1e4, betas=(0.0, 0.999))


@dataclass(frozen=True, slots=True)
class Probe:
    """A world with a known answer.

    Attributes:
        name: in a word.
        what: the world, in a line.
        suspect: the part to look at where this probe is the first that fails.
        world: to train in.
        answers: what must come of it.
    """

    name: str
    what: str
    suspect: str
    world: World
    answers: tuple[Judge, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a probe.

    Attributes:
        probe: the probe.
        checks: its known answers; the error alone, where it could not be run.
        seconds: that it took.
    """

    probe: Probe
    checks: tuple[Check, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every answer is the known one."""
        return all(check.passed for check in self.checks)


NOTHING_TO_LEARN = (no_gradient, no_movement, all_groups_equal)

PROBES = (
    Probe(
        name="constant",
        what="whatever is said earns the same",
        suspect="the advantage estimator on groups of equal rewards: rounding over a tiny std?",
        # In FP32 the mean of seven times 0.7 is not 0.7.
        world=World(("x",), lambda prompt, said: 0.7, group_size=7, updates=2),
        answers=NOTHING_TO_LEARN,
    ),
    Probe(
        name="observation",
        what="the prompt alone decides what is earned",
        suspect="groups: is the baseline that of one prompt, and are a prompt's completions "
        "side by side in sampling, judging and advantages?",
        world=World(("x", "y"), lambda prompt, said: 1.0 if prompt == "x" else -1.0, updates=2),
        answers=NOTHING_TO_LEARN,
    ),
    Probe(
        name="bandit",
        what="one token, one of which earns",
        suspect="the policy loss: its sign (cosine -1), its scale, over micro-batches too "
        "(length), or the importance ratio, which is against the policy that sampled (second "
        "gradient). If tokens are missing, or a gradient is 0 or of another cosine, alignment: are "
        "mask and advantages those of the completions? If log-probs are off, the sync: does the "
        "sampler have the weights of the last update? If p alone is wrong, the optimizer",
        world=World(
            ("x",),
            lambda prompt, said: float(said == "a"),
            iterations=2,
            updates=28,
            micro_batches=2,
            optimizer=AdamWSettings(lr=5e-3),  # so small that the second update is not all clipped
        ),
        answers=(sampler_agrees(14), all_tokens_count, gradients(2), learns("x", "a")),
    ),
    Probe(
        name="delayed",
        what="two tokens; the first decides, at the end",
        suspect="alignment: are tokens, log-probabilities and mask of the same positions, and does "
        "every token of a completion get its advantage?",
        world=World(
            ("yx",),
            lambda prompt, said: float(said[:1] == "a"),
            policy="table",
            tokens=2,
            group_size=64,
            updates=24,
            optimizer=DESCENT,
        ),
        answers=(
            sampler_agrees(1),
            all_tokens_count,
            gradients(1),
            learns("yx", "a"),
            stays("yxa"),
        ),
    ),
    Probe(
        name="contextual",
        what="two prompts, each with its own answer",
        suspect="pairing: is each completion judged against its own prompt, and laid out behind "
        "it? Or conditioning: do padding, its mask, its positions and the temperature leave the "
        "sampler's policy that of the trainer?",
        world=World(
            ("x", "yyyx"),
            lambda prompt, said: float(said[:1] == ("a" if prompt == "x" else "b")),
            policy="gpt2",
            tokens=2,
            group_size=16,
            updates=24,
            temperature=0.7,
        ),
        # The first rollout alone may have its prompts in an order that reads the same backwards.
        answers=(sampler_agrees(1), gradients(3), learns("x", "a"), learns("yyyx", "b")),
    ),
)


def run_probe(probe: Probe) -> Verdict:
    """Train in a probe's world, and compare what comes of it with the known answers."""
    began = time.perf_counter()
    try:
        with _one_thread():
            trial = attempt(probe.world)
            checks = tuple(answer(trial) for answer in probe.answers)
    except Exception as error:  # whatever keeps it from running is the finding
        reason = (str(error).strip() or "no message").splitlines()[0]
        checks = (Check("it runs", f"{type(error).__name__}: {reason}", False),)
    return Verdict(probe, checks, time.perf_counter() - began)


@contextmanager
def _one_thread() -> Iterator[None]:
    """These tensors are so small that threads would only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
