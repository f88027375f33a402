"""Asynchronous RL as a discrete-event system: how a cluster of any size spends its time.

    outcome = run(Cluster(samplers=(Samplers(slots=4096),), max_staleness=4))

`settings` and `parts` have what can be set, `system` what happens, `outcome` what is measured,
`planning` what one wants to know before a cluster is rented. Nothing here knows a network: the
constants of learning are those of `simulator.constants`, or of a calibration.
"""

from lightning_qrl.simulator.cluster.asynchrony import from_asynchrony
from lightning_qrl.simulator.cluster.lengths import Empirical, Lognormal
from lightning_qrl.simulator.cluster.measure import run
from lightning_qrl.simulator.cluster.outcome import Outcome
from lightning_qrl.simulator.cluster.parts import Samplers, Trainers, WeightSync
from lightning_qrl.simulator.cluster.planning import Headroom, largest_stable_staleness
from lightning_qrl.simulator.cluster.settings import Cluster

__all__ = [
    "Cluster",
    "Empirical",
    "Headroom",
    "Lognormal",
    "Outcome",
    "Samplers",
    "Trainers",
    "WeightSync",
    "from_asynchrony",
    "largest_stable_staleness",
    "run",
]
