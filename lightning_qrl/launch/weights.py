"""The weights of a checkpoint, and what a number format does to each."""

from collections.abc import Iterator
from pathlib import Path

from torch import nn

from lightning_qrl.analysis.quantization_error import weight_error
from lightning_qrl.build import build
from lightning_qrl.errors import UserError
from lightning_qrl.formats import Format
from lightning_qrl.launch.checkpoints import read_checkpoint
from lightning_qrl.launch.origin import find_origin
from lightning_qrl.policy import Policy
from lightning_qrl.precision.groups import place_and_kind, weight_of
from lightning_qrl.precision.select import find_linears, select
from lightning_qrl.reports.inspection import WeightError


def load_policy(checkpoint: str) -> nn.Module:
    """The model of a checkpoint.

    Args:
        checkpoint: a ``.ckpt`` of a run, the folder of a run (its newest checkpoint), or a policy's
            name, as a recipe's ``policy.name``.

    Raises:
        UserError: there is no such policy or checkpoint, or it is damaged.
    """
    path = Path(checkpoint)
    if path.suffix != ".ckpt" and not (path / "checkpoints").is_dir():
        return Policy(checkpoint).build()
    origin = find_origin(checkpoint, None)
    model = build(origin.recipe).module.policy.skeleton()
    saved = read_checkpoint(origin.checkpoint)
    state = {name.removeprefix("model."): t for name, t in saved["state_dict"].items()}
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1]
        raise UserError(f"checkpoint {checkpoint} does not fit its policy: {reason}") from None
    return model


def inspect_weights(model: nn.Module, format: Format) -> Iterator[WeightError]:
    """Quantize every weight that a plan could, one after another, in the model's order.

    Raises:
        UserError: there is none.
    """
    try:
        linears = find_linears(model)
        meant = select("linears", linears)  # every layer but the routers
    except ValueError as error:
        raise UserError(str(error)) from None
    for name in filter(meant.__contains__, linears.decoder):
        layer = linears.decoder[name]
        weight = weight_of(model, name)
        _, kind = place_and_kind(name, layer)
        yield WeightError(name, layer, kind, tuple(weight.shape), weight_error(weight, format))
