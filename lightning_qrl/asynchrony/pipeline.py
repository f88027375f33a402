"""Samplers that run ahead of the trainer, without old weights.

When a phase of training begins, its weights are at hand, and the `schedule` knows all that samplers
will ever compute with them. It is computed there and then, in one batch, and kept until the phase
that trains on it: whole groups of completions, or with in_flight_update those tokens of each that
are these weights' own. A completion goes on from its prompt and the tokens it has, so the prefix
is computed again under the new weights: what engines call recomputing the key-value cache. Groups
that will be discarded are never sampled.

So asynchrony costs no memory but that of the tokens that wait, and of time the sampling of what is
left in the queue when a run ends: a phase costs what a synchronous one does, save for the first,
which fills the queue. What waits is part of a checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar

import torch

from lightning_qrl.asynchrony.completions import pack, unpack
from lightning_qrl.asynchrony.schedule import Group, Schedule, Span
from lightning_qrl.errors import UserError
from lightning_qrl.experience import Completion
from lightning_qrl.metrics import Metric
from lightning_qrl.seeding import derive_seed
from lightning_qrl.tasks.base import Prompt

ROLLOUTS = 2  # whose completions are sampled at one time, at most
T = TypeVar("T")


class Sampler(Protocol):
    """Samples with the weights at hand (see `PolicyModule.sample`)."""

    def __call__(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        seed: int,
        *,
        limits: Sequence[int],
        begun: Sequence[Completion] | None = None,
    ) -> list[Completion]:
        """``samples`` completions of each prompt, or the completions in ``begun`` gone on with."""


class Pipeline:
    """What one rank's samplers have done.

    Args:
        schedule: says what is sampled when.
        group_size: completions of each prompt, G.
        stream: the prompts, by their numbers.
    """

    def __init__(
        self, schedule: Schedule, group_size: int, stream: Callable[[int], Prompt]
    ) -> None:
        self._schedule, self._each, self._stream = schedule, group_size, stream
        self._held: dict[int, list[Completion]] = {}
        self._rows = ROLLOUTS * len(schedule.window(0)[0].groups) * group_size

    def prompts(self, phase: int) -> list[Prompt]:
        """The prompts of the groups that a phase trains on."""
        return [self._stream(group.number) for group in self._schedule.window(phase)[0].groups]

    def step(self, phase: int, sample: Sampler, seed: int) -> list[Completion]:
        """Sample all that the weights at hand are to sample; then take what the phase trains on.

        Args:
            phase: number of the phase that begins.
            sample: samples with the weights at hand.
            seed: of this phase and rank.

        Returns:
            G completions of each of its `prompts`, those of one prompt side by side.
        """
        work = self._schedule.work(phase)
        self._begin([(g, s) for g, s in work if not s.begin], sample, derive_seed(seed, "begin"))
        self._go_on([(g, s) for g, s in work if s.begin], sample, derive_seed(seed, "go on"))
        groups = self._schedule.window(phase)[0].groups
        return [completion for group in groups for completion in self._held.pop(group.number)]

    def _begin(self, work: Sequence[tuple[Group, Span]], sample: Sampler, seed: int) -> None:
        for number, part in enumerate(_batches(work, self._rows // self._each)):
            prompts = [self._stream(group.number) for group, _ in part]
            limits = [span.end for _, span in part]
            sampled = iter(sample(prompts, self._each, derive_seed(seed, number), limits=limits))
            for group, _ in part:
                self._held[group.number] = list(islice(sampled, self._each))

    def _go_on(self, work: Sequence[tuple[Group, Span]], sample: Sampler, seed: int) -> None:
        going = [
            (group.number, i, span.end - span.begin)
            for group, span in work
            for i, completion in enumerate(self._held.get(group.number, ()))
            if completion.truncated  # so far: others have ended
        ]
        for number, part in enumerate(_batches(going, self._rows)):
            prompts = [self._stream(n) for n, *_ in part]
            limits, begun = [limit for *_, limit in part], [self._held[n][i] for n, i, _ in part]
            more = sample(prompts, 1, derive_seed(seed, number), limits=limits, begun=begun)
            for (n, i, _), completion in zip(part, more, strict=True):
                self._held[n][i] = completion

    def metrics(self, phase: int) -> dict[str, Metric]:
        """What the schedule says of a phase."""
        now = self._schedule.window(phase)[0]
        return flow_metrics(now.waiting, now.discarded, now.waited)

    def state_dict(self) -> dict[str, Any]:
        """What waits, as plain values and tensors."""
        completions = [completion for group in self._held.values() for completion in group]
        return {
            "numbers": torch.tensor(list(self._held)),
            "completions": pack(completions),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what waited."""
        numbers = state["numbers"].tolist()
        completions = iter(unpack(state["completions"], len(numbers) * self._each))
        self._held = {number: list(islice(completions, self._each)) for number in numbers}


def check_queue(stored: Mapping[str, Any], settings: Mapping[str, Any], ranks: int) -> None:
    """Raise UserError where a run cannot go on with the queue of a checkpoint.

    Args:
        stored: what `RolloutData.state_dict` gave; empty of a synchronous run.
        settings: what the run's own queue would be filled with.
        ranks: the run's.
    """
    before = stored.get("filled_with", {"max_staleness": 0})
    for key in settings if stored else before:
        if settings[key] != before.get(key):
            raise UserError(
                f"the checkpoint's queue was filled with {key}={before.get(key)}, now it is "
                f"{settings[key]}; resume with the same, or start anew"
            )
    if stored and len(stored["queues"]) != ranks:
        raise UserError(
            f"the checkpoint has the queues of {len(stored['queues'])} ranks, and there are "
            f"{ranks}; resume with as many, or start anew"
        )


def flow_metrics(waiting: int = 0, discarded: int = 0, waited: float = 0.0) -> dict[str, Metric]:
    """The state of the queue, by its full names; by default that of a synchronous trainer."""
    return {
        "async/queue_size": Metric("sum", waiting),
        "async/discarded": Metric("sum", discarded),
        "async/trainer_wait": Metric("max", waited),
    }


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """At most ``size`` of them at a time."""
    for first in range(0, len(items), size):
        yield items[first : first + size]
