"""What came of a run of the reference model, in a few numbers.

How busy a side is: the time in which it computes over the time of the run. A trainer that a
broadcast blocks does not compute.
"""

from collections import Counter
from dataclasses import dataclass

from lightning_qrl.simulator.closed_forms import critical_effective, plateau
from lightning_qrl.simulator.constants import POST, Constants
from lightning_qrl.simulator.trace import Fate, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run in numbers.

    Attributes:
        optimizer_steps: how many began.
        final_reward: after the last of them.
        final_drift: the same.
        diverged_at_step: from 0; None if the run did not diverge.
        diverged_at_time: when that step began.
        quantization_floor: the mismatch that quantization alone makes.
        mean_mismatch: over the steps, as mean |Δlogprob|; 0 without a step, as the next ones.
        mean_effective: what of it the optimizer cannot average away.
        critical_effective: above it nothing holds the drift.
        drift_plateau: where the drift rests if its mismatch is the mean one; None: nowhere.
        mean_staleness: of consumed rollouts, in versions.
        staleness: consumed rollouts by versions behind, rounded to the nearest.
        rollouts: how many began.
        consumed: by optimizer steps.
        discarded: too old.
        queued: wait at the end.
        running: are sampled at the end.
        trainer_utilization: share of the time.
        sampler_utilization: the same, over all of them.
        why_no_step: in words; None where there was a step.
    """

    optimizer_steps: int
    final_reward: float
    final_drift: float
    diverged_at_step: int | None
    diverged_at_time: float | None
    quantization_floor: float
    mean_mismatch: float
    mean_effective: float
    critical_effective: float
    drift_plateau: float | None
    mean_staleness: float
    staleness: dict[int, int]
    rollouts: int
    consumed: int
    discarded: int
    queued: int
    running: int
    trainer_utilization: float
    sampler_utilization: float
    why_no_step: str | None

    @property
    def stable(self) -> bool:
        """Whether it trained and did not diverge."""
        return self.why_no_step is None and self.diverged_at_step is None


def summarize(trace: Trace, constants: Constants = POST) -> Summary:
    """The numbers of a run.

    Args:
        trace: of the run.
        constants: those that it had.
    """
    steps, learning, diverged = trace.steps, constants.learning, trace.diverged_at_step
    count, effective = max(1, len(steps)), [step.effective for step in steps]
    mean_effective = sum(effective) / count
    ages = Counter(int(age + 0.5) for step in steps for age in step.ages)
    fates: Counter[Fate] = Counter(rollout.fate for rollout in trace.rollouts)
    return Summary(
        optimizer_steps=len(steps),
        final_reward=trace.final_reward,
        final_drift=trace.final_drift,
        diverged_at_step=diverged,
        diverged_at_time=None if diverged is None else steps[diverged].start,
        quantization_floor=trace.floor,
        mean_mismatch=sum(step.mismatch for step in steps) / count,
        mean_effective=mean_effective,
        critical_effective=critical_effective(learning),
        drift_plateau=plateau(mean_effective, learning),
        mean_staleness=trace.mean_staleness,
        staleness=dict(sorted(ages.items())),
        rollouts=len(trace.rollouts),
        consumed=fates["consumed"],
        discarded=fates["discarded"],
        queued=fates["queued"],
        running=fates["running"],
        trainer_utilization=trace.trainer_utilization,
        sampler_utilization=trace.sampler_utilization,
        why_no_step=trace.why_no_step,
    )
