"""Dynamic loss scaling: gradients of a scaled loss, so that FP16 does not lose the small ones.

FP16 rounds what is below 3e-8 to 0 and what is above 65504 to infinity. The loss is multiplied by
S = 2^k before the backward, so that all gradients are; the finished gradient is divided by S again,
exactly, before anything else reads it: callbacks, the module's gradient norm, clipping.
(Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740; the interval is that of Qi et
al., arXiv 2510.26788.)

    some gradient is not finite       the step is skipped: weights, moments and the optimizer's own
                                      count of steps stay bit for bit; S becomes S / 2
    all are, 400 steps in a row       S becomes 2 S

The arithmetic is `torch.amp.GradScaler`'s, and its place in the step that of Lightning's 16-mixed
plugin, whose autocast is left out here: layers compute as the precision plan says.

A skipped step counts in `global_step`, in the schedule of the learning rate and as a weight
version: Lightning counts calls.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.optim import Optimizer
from typing_extensions import override

from lightning_qrl.errors import UserError


class LossScaling(MixedPrecision):
    """Lightning's precision plugin for 32-true, with a loss that is scaled.

    Args:
        initial_scale: S at the start; a power of two, so that scaling rounds nothing.
        growth_interval: steps in a row without overflow after which S doubles.

    Attributes:
        skipped: steps that were skipped so far.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, initial_scale: float, growth_interval: int) -> None:
        if not 1 <= initial_scale < math.inf or math.frexp(initial_scale)[0] != 0.5:
            raise ValueError(
                f"initial_scale must be a power of two, 1 or larger, got {initial_scale}"
            )
        if growth_interval < 1:
            raise ValueError(f"growth_interval must be at least 1, got {growth_interval}")
        # "cpu" is where it can always be made; it goes where the loss is
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=initial_scale, growth_interval=growth_interval
        )
        super().__init__("16-mixed", "cpu", scaler)
        self.precision = "32-true"
        self.scaler: torch.amp.GradScaler = scaler
        self.skipped = 0

    @property
    def scale(self) -> float:
        """S, of the next step."""
        return float(self.scaler.get_scale())

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """No autocast."""
        yield

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **given: Any
    ) -> Any:
        """One step, or none; see the module's text.

        Raises:
            UserError: gradients overflow without any scaling.
        """
        before = self.scale
        result = super().optimizer_step(optimizer, model, closure, **given)
        if self.scale < before:
            self.skipped += 1
            optimizer._opt_called = True  # type: ignore[attr-defined]  # or the schedule warns
        if self.scale < 1:
            raise UserError(
                "gradients overflow FP16 although the loss is not scaled up any more: training "
                "has diverged; lower optimizer.lr"
            )
        return result

    @override
    def state_dict(self) -> dict[str, Any]:
        streak = self.scaler.state_dict()["_growth_tracker"]
        return {"scale": self.scale, "streak": streak, "skipped": self.skipped}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        scale, streak = state_dict["scale"], state_dict["streak"]
        own = self.scaler.state_dict()  # its factors and its interval stay
        self.scaler.load_state_dict(own | {"scale": scale, "_growth_tracker": streak})
        self.skipped = state_dict["skipped"]
