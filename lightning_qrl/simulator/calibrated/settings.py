"""Settings of the reference model's clock where a calibration says what precision does.

A run is of one of the calibration's plans, which stands in the place of precision, backward, layers
that stay in BF16 and four-over-six. These keep values that no one sees, those of BF16: its times
are the unit of the model's, and it has no kicks.
"""

from dataclasses import dataclass, fields
from typing import Any

from typing_extensions import override

from lightning_qrl.simulator.constants import Precision
from lightning_qrl.simulator.settings import Settings

OF_PLAN = ("precision", "backward", "bf16_tail", "shared_experts", "four_over_six")


@dataclass(frozen=True, kw_only=True)
class PlanSettings(Settings):
    """A run with a plan of a calibration.

    Attributes:
        plan: its name.
        precision: is the plan's; do not set it.
    """

    plan: str
    precision: Precision = "bf16"

    @override
    def shown(self) -> dict[str, Any]:
        """The plan, and what it does not decide."""
        names = ("plan", *(item.name for item in fields(Settings) if item.name not in OF_PLAN))
        return {name: getattr(self, name) for name in names}
