"""What each cure of the sampler-trainer mismatch costs: a step with it beside one without.

    python benchmarks/cures.py
    OMP_NUM_THREADS=1 python benchmarks/cures.py --rounds 10 --only score_centering

Both train the policy under the same recipe (the embedded one in FP32; the mixture for router
replay; mixed BF16 for the FP32 head, slow on a CPU without BF16 units) on the same prompts, 32 of
16 completions a step, and take turns of two steps in one process. The ratio is the median over
neighbours' ratios, so that what slows the machine down slows both. One update a rollout.
"""

import argparse
import statistics
from dataclasses import dataclass

from _parties import Ours
from grpo_step import quiet

from lightning_qrl.reports.tables import text_table


@dataclass(frozen=True)
class Pair:
    """A cure, and what it is added to."""

    recipe: str
    cure: str
    options: tuple[str, ...] = ()


TURN = 2  # timed steps of a turn, after one that is not
PAIRS = {
    "truncated_importance_sampling": Pair("base", "truncated_importance_sampling={}"),
    "truncated_importance_sampling, sequence": Pair(
        "base", "truncated_importance_sampling={level: sequence, cap: 8.0}"
    ),
    "masked_importance_sampling": Pair("base", "masked_importance_sampling={}"),
    "rejection_sampling": Pair("base", "rejection_sampling={}"),
    "score_centering": Pair("base", "score_centering={}"),
    "vcpo": Pair("base", "vcpo={}"),
    "adaptive_quantization_noise": Pair("base", "adaptive_quantization_noise={stages: 3}"),
    "router_replay": Pair("base", "router_replay={}", ("policy.name=embedded-moe",)),
    "fp32_lm_head": Pair("base", "fp32_lm_head={}", ("trainer.precision=bf16-mixed",)),
}


def main() -> None:
    """Parse, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6, help="turns of each")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--only", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    args = parser.parse_args()
    quiet()
    rows = []
    for name in args.only:
        plain, cured, ratios = compare(PAIRS[name], args.rounds, args.prompts)
        low, middle, high = statistics.quantiles(ratios, n=4)
        times, spread = [f"{plain:.0f}", f"{cured:.0f}"], f"{low:.3f}-{high:.3f}"
        rows.append([name, *times, f"{middle:.3f}", spread])
    print(text_table(["cure", "without, ms", "with, ms", "ratio", "quartiles"], rows))


def compare(pair: Pair, rounds: int, prompts: int) -> tuple[float, float, list[float]]:
    """Median step times in ms without and with the cure, and the ratios of neighbours."""
    parties = [
        Ours(pair.recipe, prompts, pair.options),
        Ours(pair.recipe, prompts, (*pair.options, f"callbacks.{pair.cure}")),
    ]
    for party in parties:
        party.segment(TURN)
        party.stopwatch.steps.clear()
    for _ in range(rounds):
        for party in parties:
            party.segment(TURN)
    plain, cured = ([sum(step.values()) for step in p.stopwatch.steps] for p in parties)
    ratios = [with_it / without for with_it, without in zip(cured, plain, strict=True)]
    return 1e3 * statistics.median(plain), 1e3 * statistics.median(cured), ratios


if __name__ == "__main__":
    main()
