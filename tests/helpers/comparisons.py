"""Comparisons made by hand, that look like those of an ablation."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from recorded import learning
from scipy import stats

from lightning_qrl.reports.comparison import Arm, Comparison, Difference
from lightning_qrl.reports.measures import Measure
from lightning_qrl.tracking.histories import History
from lightning_qrl.tracking.notebook import RecordedRun

RECIPE = """\
seed: {seed}
policy:
  name: embedded
callbacks:
{callbacks}  held_out_evaluation:
    prompts: 512
tracking:
  experiment: run-{seed}
"""
INGREDIENTS = ("forward_quantization", "dequantized_backward", "bf16_tail", "sensitive_weights")
MEASURES = (
    Measure("held_out_reward", "held-out reward", "", "higher", "{:.3f}", "the last eval/reward"),
    Measure("reward_area", "reward, area", "", "higher", "{:.3f}", "eval/reward over steps"),
    Measure("mismatch", "|Δlogprob|", "", "lower", "{:.4f}", "mean over steps", "ratio"),
    Measure("max_norm", "largest gradient norm", "", "lower", "{:.3g}", "over steps", "ratio"),
    Measure("spikes", "spikes", "", "lower", "{:.1f}", "norms over 3 times the run's median"),
    Measure("entropy", "entropy at the end", "nats", None, "{:.3f}", "mean of the last tenth"),
)
VERSIONS = {"qrl.torch": "2.13.0", "qrl.python": "3.11", "qrl.git_commit": "0f" * 20}


def run_of(
    arm: str, seed: int, metrics: dict[str, History], removed: Sequence[str] = (), **given
) -> RecordedRun:
    """A run with a recipe, a plan and tags."""
    kept = "".join(f"  {key}: {{}}\n" for key in INGREDIENTS if key not in removed)
    texts = {
        "recipe.yaml": RECIPE.format(seed=seed, callbacks=kept),
        "plan.txt": f"layer  weight\nmlp    {'nvfp4' if 'forward' in kept else 'bf16'}\n",
    }
    plain = RecordedRun(
        id=f"{abs(hash_of(arm)):08x}{seed:024x}", name=f"{arm}-seed{seed}", experiment="lessons",
        status="FINISHED", tags={**VERSIONS, "qrl.seed": str(seed)}, params={},
        started=1.8e9 + 300 * seed, ended=1.8e9 + 300 * seed + 271, metrics=metrics, texts=texts,
    )  # fmt: skip
    return replace(plain, **given)


def hash_of(text: str) -> int:
    """The same in every process."""
    return sum(ord(c) * 31**i for i, c in enumerate(text)) % 2**32


def history_of(seed: int, steps: int, shift: float, mismatch: float) -> dict[str, History]:
    """A run's histories: gradient norms with some spikes, a mismatch that grows."""
    made = learning(seed, steps, shift=shift, every=max(1, steps // 8))
    rng = np.random.default_rng(seed)
    at_S = np.arange(1, steps + 1)
    norms = 0.6 * np.exp(0.25 * rng.standard_normal(steps))
    norms *= np.where(rng.random(steps) < 0.02 * mismatch, 8.0, 1.0)
    made["train/grad_norm"] = History(at_S, norms)
    drift = 0.02 * mismatch * np.exp(0.1 * rng.standard_normal(steps)) * (1 + at_S / steps)
    made["train/sampling/sampling_logp_difference/mean"] = History(at_S, drift)
    made["rollout_corr/k3_kl"] = History(at_S, drift**2)
    return made


def comparison_of(arms: Sequence[Arm], notes: Sequence[str] = ()) -> Comparison:
    """Arms with their differences to the first: Student's t for the intervals."""
    base = arms[0]
    found = {
        (arm.name, measure.key): _difference(
            base.values.get(measure.key, {}), arm.values.get(measure.key, {}), measure, len(arms)
        )
        for arm in arms[1:]
        for measure in MEASURES
    }
    return Comparison("ablate-4bitter", tuple(arms), MEASURES, found, tuple(notes))


def arm_of(name: str, runs: dict[int, RecordedRun], removed: Sequence[str] = ()) -> Arm:
    """An arm with the values of its runs."""
    values: dict[str, dict[int, float]] = {measure.key: {} for measure in MEASURES}
    for seed, run in runs.items():
        for key, value in _values(run).items():
            values[key][seed] = value
    return Arm(name, "4bitter", tuple(removed), runs, values, {})


def ablation(steps: int = 80, seeds: int = 3, arms: int = 6) -> Comparison:
    """A full stack, and less this and that: of which some matter."""
    given = [
        ("full", 0.0, 1.0, ()),
        ("empty", 0.01, 0.05, INGREDIENTS),
        ("without forward_quantization", 0.005, 0.05, ("forward_quantization",)),
        ("without dequantized_backward", -0.02, 1.1, ("dequantized_backward",)),
        ("without bf16_tail", -0.05, 1.6, ("bf16_tail",)),
        ("without sensitive_weights", -0.25, 3.0, ("sensitive_weights",)),
    ]
    given += [(f"without callback {i}", -0.01 * i, 1 + 0.1 * i, ()) for i in range(arms - 6)]
    made = []
    for number, (name, shift, mismatch, removed) in enumerate(given[:arms]):
        runs = {
            seed: run_of(
                name, seed, history_of(100 * number + seed, steps, shift, mismatch), removed
            )
            for seed in range(seeds)
        }
        made.append(arm_of(name, runs, removed))
    notes = ["Each p value is corrected for the number of arms (Holm), not of measures."]
    if seeds == 1:
        notes.insert(0, "With one seed an arm nothing can be concluded.")
    return comparison_of(made, notes)


def _values(run: RecordedRun) -> dict[str, float]:
    if "eval/reward" not in run.metrics:
        return {}
    evaluated, norms = run.metrics["eval/reward"], run.metrics["train/grad_norm"].values
    span = evaluated.steps[-1] - evaluated.steps[0]
    return {
        "held_out_reward": float(evaluated.values[-1]),
        "reward_area": float(np.trapezoid(evaluated.values, evaluated.steps) / span),
        "mismatch": float(
            run.metrics["train/sampling/sampling_logp_difference/mean"].values.mean()
        ),
        "max_norm": float(norms.max()),
        "spikes": float((norms > 3 * np.median(norms)).sum()),
        "entropy": float(run.metrics["train/entropy"].values[-8:].mean()),
    }


def _difference(base: dict[int, float], own: dict[int, float], measure: Measure, arms: int):
    seeds = sorted(base.keys() & own.keys())
    pairs = np.array([(base[seed], own[seed]) for seed in seeds]).reshape(-1, 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        pairs = np.log(pairs) if measure.scale == "ratio" else pairs
        apart = pairs[:, 1] - pairs[:, 0]
    nan = math.nan
    if len(apart) < 2:
        mean = float(apart[0]) if len(apart) else nan
        return Difference(len(apart), mean, nan, nan, nan, nan, marked=False)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean, error = float(apart.mean()), apart.std(ddof=1) / np.sqrt(len(apart))
        p = float(2 * stats.t.sf(abs(mean / error), len(apart) - 1))
    half = stats.t.ppf(0.975, len(apart) - 1) * error
    corrected = min(1.0, p * (arms - 1))
    return Difference(
        len(apart), mean, mean - half, mean + half, p, corrected, marked=corrected < 0.05
    )
