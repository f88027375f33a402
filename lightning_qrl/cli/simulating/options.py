"""The options of `qrl simulate`, and which of them go together."""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer

from lightning_qrl.errors import UserError

PAGE = "simulator.html"
PRESETS = "bf16, fp8_hp, fp8_dq, fp4_naive, fp4_dq, fp4_46_dq, fp4_46_dq_tail, fp4_full"
SETTINGS = (
    "precision, backward, bf16_tail, shared_experts, four_over_six, max_staleness, weight_sync, "
    "batch, horizon, samplers, seed; with --cluster, keys such as samplers.slots: --format json "
    "shows all of them."
)
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help=SETTINGS)]
Preset = Annotated[str | None, typer.Option(metavar="NAME", help=f"Start from one of {PRESETS}.")]
Recipe = Annotated[
    str | None,
    typer.Option("--recipe", "-r", help="Start from a recipe's precision and asynchrony."),
]
Compare = Annotated[
    tuple[str, str] | None,
    typer.Option(
        metavar="A B", help="Two runs: presets, recipes, or settings as key=value,key=value."
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=A..B", help="A range, or a list (v1,v2); twice: a heat map."),
]
Seeds = Annotated[
    int | None,
    typer.Option(metavar="N", help="N seeds each: mean reward, and how many runs diverge."),
]
Page = Annotated[
    Path | None, typer.Option(metavar="[FILE]", help=f"Write the interactive page; {PAGE}.")
]
Calibrate = Annotated[
    list[str] | None,
    typer.Option(metavar="EXPERIMENT", help="Fit the model to runs in MLflow; may be repeated."),
]
Save = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the calibration as JSON.")]
Calibration = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Use a calibration; plan=NAME is one of its plans."),
]
IsCluster = Annotated[
    bool, typer.Option("--cluster", help="Samplers and trainers of any number, in seconds.")
]
ClusterFile = Annotated[
    Path | None, typer.Option("--settings", metavar="FILE", help="The cluster's, as YAML.")
]
Margin = Annotated[
    float | None,
    typer.Option(help="Find the largest staleness that is stable with this margin, as 0.2."),
]

EVERYWHERE = {"--calibration", "--format", "KEY=VALUE"}
START = {"--preset", "--recipe"}
USES = {  # what each way of simulating has a use for
    "--calibrate": {"--save", "--format"},
    "--cluster": {"--settings", "--recipe", "--margin", "--sweep", *EVERYWHERE},
    "--page": {"KEY=VALUE", *START},
    "--compare": EVERYWHERE,
    "--sweep": {"--seeds", *EVERYWHERE, *START},
    "": {"--seeds", *EVERYWHERE, *START},
}
SEVERAL = {"--sweep", "--calibrate"}  # may be given more than once
FLAGS = {"--cluster"}
SHORT = {"-r": "--recipe"}
NEEDS = {"--save": "--calibrate", "--settings": "--cluster", "--margin": "--cluster"}


def check_together(given: set[str]) -> None:
    """Raise UserError for an option that what is asked for has no use for."""
    way = next((way for way in USES if way in given), "")
    for option in sorted(given - {way} - USES[way]):
        without = NEEDS.get(option)
        reason = f"without {without}" if without else f"with {way}"
        raise UserError(f"{option} does nothing {reason}; take it out")
    for a, b in (("--preset", "--recipe"), ("--settings", "--recipe")):
        if given >= {a, b}:
            raise UserError(f"{a} and {b} both say where to start from; give one of them")
    if given >= {"--cluster", "--recipe", "--calibration"}:
        raise UserError(
            "--recipe and --calibration both say how long things take in a cluster; give one of "
            "them"
        )


def check_once(arguments: Sequence[str]) -> None:
    """Raise UserError for an option that is given twice, where the last would win in silence."""
    seen = set()
    for argument in takewhile("--".__ne__, arguments):
        name = argument.partition("=")[0]
        name = SHORT.get(name[:2], name)
        if name in seen and name not in SEVERAL | FLAGS:
            raise UserError(f"{name} is given twice; take one of them out")
        if name.startswith("--"):
            seen.add(name)


def with_page_file(arguments: list[str]) -> list[str]:
    """Put a file after each ``--page`` that has none: options and KEY=VALUE are none."""
    made = []
    for place, argument in enumerate(arguments):
        made.append(argument)
        if argument == "--page" and "--" not in arguments[:place]:
            following = arguments[place + 1 : place + 2]
            if not any(map(_is_file, following)):
                made.append(PAGE)
    return made


def _is_file(text: str) -> bool:
    return text.endswith(".html") or not (text.startswith("-") or "=" in text)
