"""`qrl inspect`: what a number format would do to a checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lightning_qrl.cli.quiet import quiet_imports
from lightning_qrl.errors import UserError


def inspect(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="A policy (name or folder), or a .ckpt of a run."
        ),
    ],
    format: Annotated[str, typer.Option("--format", "-f", help="A number format.")],
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of the format; may be repeated."),
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The figure; inspect-NAME-FORMAT.png.")
    ] = None,
) -> None:
    """Print what a format does to each weight, and why: scale, deadzone or grid.

    The last columns: shares of the squared error, whose cross terms are mostly negative and which
    sum to 1; s/s*, the mean of a scale over the ideal one; gain, <Q, x> / |x|^2.

    Example: qrl inspect embedded --format nvfp4 --option four_over_six=mae
    """
    options = _options(option or ())
    with quiet_imports():
        from lightning_qrl.formats import get_format
        from lightning_qrl.launch.weights import inspect_weights, load_policy
        from lightning_qrl.reports.figures import check_figure
        from lightning_qrl.reports.inspection import draw_inspection, inspection_text

    try:
        chosen = get_format(format, **options)
    except (ValueError, TypeError) as error:
        raise UserError(f"--format, --option: {error}") from None
    name = Path(checkpoint).stem
    file = figure or Path(f"inspect-{name}-{chosen.name}.png")
    check_figure(file)
    errors = list(inspect_weights(load_policy(checkpoint), chosen))
    print(inspection_text(errors), end="")
    draw_inspection(file, f"{chosen} on the weights of {name}", errors)
    print(f"figure  {file}")


def _options(pairs: Sequence[str]) -> dict[str, Any]:
    """What ``--option`` says; a value is YAML, as in a recipe."""
    import yaml

    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise UserError(f"--option {pair}: write key=value")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(f"--option {pair}: the value is no YAML") from None
    return options
