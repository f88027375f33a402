"""The runs of `simulator.py`: what they have in common, and their arms."""

from collections.abc import Iterator

from grids import PRECISIONS, Arm

COMMON = (
    "grpo.loss=reinforce",
    "grpo.prompts_per_rollout=8",
    "callbacks.held_out_evaluation={prompts: 512, every_n_steps: 20}",
)
LAGS = (0, 1, 2, 4, 8, 16)
LATE = {"completion_time": 1.5, "completion_time_spread": 0.5}
VALIDATION: dict[str, dict[str, float | bool]] = {
    "constant": {"max_staleness": 2},
    "rare_sync": {"max_staleness": 5, "queue_depth": 2, "weight_sync_every": 4},
    "late": {"max_staleness": 4, "queue_depth": 1, "samplers": 12, **LATE},
    "late_in_flight": {
        "max_staleness": 4, "queue_depth": 1, "samplers": 12, **LATE, "in_flight_update": True,
    },
    "strict": {"max_staleness": 2, "queue_depth": 1, "samplers": 24, "completion_time": 2.0,
               "completion_time_spread": 1.0},
    "few_samplers": {"max_staleness": 2, "queue_depth": 1, "samplers": 4, "completion_time": 1.0,
                     "completion_time_spread": 0.5},
    "deep_queue": {"max_staleness": 8, "queue_depth": 4, "samplers": 16, "completion_time": 3.0,
                   "completion_time_spread": 1.0},
    "regular": {"max_staleness": 3, "queue_depth": 1, "samplers": 20, "completion_time": 2.0},
}  # fmt: skip
STEPS = {"calibration": 60, "validation": 120}
SEEDS = {"calibration": 2, "validation": 2}


def arms(experiment: str) -> Iterator[Arm]:
    """A recipe and its settings of asynchrony each."""
    if experiment == "calibration":
        for lag in LAGS:
            for recipe in PRECISIONS:
                yield Arm(f"{recipe}-lag{lag}", recipe, (f"rollout.max_staleness={lag}",))
        return
    for name, knobs in VALIDATION.items():
        given = (f"rollout.{key}={str(value).lower()}" for key, value in knobs.items())
        yield Arm(name, "4bitter", tuple(given))
