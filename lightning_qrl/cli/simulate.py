"""`qrl simulate`: what staleness and quantization do to asynchronous RL, before a cluster is burnt.

Settings are laid over one another: the defaults, a preset or a recipe, KEY=VALUE. Options that
would do nothing beside each other are refused.
"""

from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typing_extensions import override

from lightning_qrl.cli.options import check_file
from lightning_qrl.cli.simulating import options


class Format(StrEnum):
    """What is printed."""

    text = "text"
    json = "json"


class Simulate(TyperCommand):
    """A command whose ``--page`` may stand without a file, which no option of typer can."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, with the usual file put in where ``--page`` stands alone."""
        options.check_once(args)
        return super().parse_args(ctx, options.with_page_file(args))


def simulate(
    overrides: options.Overrides = None,
    *,
    preset: options.Preset = None,
    recipe: options.Recipe = None,
    compare: options.Compare = None,
    sweep: options.Sweep = None,
    seeds: options.Seeds = None,
    page: options.Page = None,
    calibrate: options.Calibrate = None,
    save: options.Save = None,
    calibration: options.Calibration = None,
    cluster: options.IsCluster = False,
    settings: options.ClusterFile = None,
    margin: options.Margin = None,
    format: Annotated[Format, typer.Option("--format", help="What to print.")] = Format.text,
) -> None:
    """Simulate asynchronous RL in low precision: its timeline, drift and reward.

    Runs of MLFLOW_TRACKING_URI, else of the file mlflow.db here, are what --calibrate reads.

    Example: qrl simulate --preset fp4_full --sweep max_staleness=0..8 batch=8
    """
    given = {
        "--calibrate": calibrate, "--cluster": cluster, "--page": page, "--compare": compare,
        "--sweep": sweep, "--seeds": seeds is not None, "--preset": preset, "--recipe": recipe,
        "--save": save, "--calibration": calibration, "--settings": settings,
        "--margin": margin is not None, "--format": format is Format.json, "KEY=VALUE": overrides,
    }  # fmt: skip
    options.check_together({name for name, value in given.items() if value})
    for option, file, suffix in (("--save", save, ".json"), ("--page", page, ".html")):
        if file is not None:
            check_file(option, file, suffix)
    as_json = format is Format.json
    if calibrate:
        from lightning_qrl.cli.simulating.calibration import fit

        fit(calibrate, save, as_json=as_json)
    elif cluster:
        from lightning_qrl.cli.simulating.cluster import show_cluster

        asked = overrides or [], settings, recipe, calibration
        show_cluster(*asked, sweep or [], margin, as_json=as_json)
    else:
        from lightning_qrl.cli.simulating.reference import show

        start = preset, recipe, overrides or [], calibration
        show(start, sweep or [], seeds, compare, page, as_json=as_json)
