"""The simulators' speed on one core, against what is promised.

    python benchmarks/simulator.py [--repeats 5]

* The reference model: one run of each horizon, and a sweep of 1,000 settings, one after the other.
* The cluster: one simulated hour of 4,096 samplers at 60 tokens a second, with completions of 4,000
  tokens, and with 600 tokens (10 s each, 1.5 million of them): queue bounded and not, weights that
  change in mid-flight with the prefix read again, and a search for the largest stable staleness.
  Weights that change in mid-flight cost work by slots times syncs: with few completions, 20 s are
  enough for about 3,000 syncs.

Times are processor seconds of this process: the least of the repeats for what takes milliseconds,
and of one run for what takes seconds.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

from lightning_qrl.simulator.cluster import (
    Cluster,
    Lognormal,
    Samplers,
    Trainers,
    largest_stable_staleness,
    run,
)
from lightning_qrl.simulator.constants import Horizon
from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import PRESETS, Settings

SWEEP = 1000


def seconds(act: Callable[[], object], repeats: int = 1) -> float:
    """The least processor time of so many calls."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        act()
        times.append(time.process_time() - start)
    return min(times)


def grid() -> Iterator[Settings]:
    """1,000 settings: presets, horizons, caps, batches, weight sync."""
    every = itertools.product(
        PRESETS.values(), get_args(Horizon), range(9), (2, 4, 8, 16), (False, True)
    )
    for preset, horizon, cap, batch, sync in itertools.islice(every, SWEEP):
        yield Settings(**preset, horizon=horizon, max_staleness=cap, batch=batch, weight_sync=sync)


def sweep() -> None:
    """Run them all."""
    for settings in grid():
        simulate(settings)


def cluster(tokens: float, prefill: float = math.inf, **settings: Any) -> Cluster:
    """4,096 samplers, and trainers that just keep up."""
    pool = Samplers(slots=4096, tokens_per_second=60.0, prefill_tokens_per_second=prefill)
    return Cluster(
        samplers=(pool,),
        trainers=Trainers(count=64, tokens_per_second=5000.0),
        lengths=Lognormal(mean=tokens, spread=0.8, limit=16_384),
        batch=256,
        duration=3600.0,
        **settings,
    )


CLUSTERS = {
    "4,000 tokens": cluster(4000),
    "600 tokens": cluster(600),
    "600 tokens, unbounded queue": cluster(600, queue_depth=None, max_staleness=None),
    "600 tokens, prefix read again": cluster(600, prefill=5000.0, in_flight_update=True),
}


def rows(repeats: int) -> Iterator[tuple[str, float, float]]:
    """What was timed, its seconds, and what is promised."""
    for horizon in get_args(Horizon):
        one = partial(simulate, Settings(horizon=horizon))
        yield f"reference, one run, {horizon} horizon", seconds(one, repeats), 0.03
    yield f"reference, sweep of {SWEEP}", seconds(sweep), 20.0
    for name, made in CLUSTERS.items():
        yield f"cluster, 1 h of 4,096 slots, {name}", seconds(partial(run, made)), 20.0
    search = partial(largest_stable_staleness, CLUSTERS["4,000 tokens"])
    yield "largest stable staleness, 4,000 tokens", seconds(search), math.inf


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    print(f"{'':58}{'seconds':>9}{'promised':>10}")
    for name, took, promised in rows(parser.parse_args().repeats):
        print(f"{name:58}{took:9.3f}{promised:10g}", flush=True)


if __name__ == "__main__":
    main()
