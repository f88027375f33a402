"""`qrl`: one command, one file: parse, hand over, print. Torch is imported only where needed."""

import sys

import typer

from lightning_qrl.cli import (
    ablate,
    compare,
    doctor,
    fit,
    inspect,
    plan,
    recipes,
    sensitivity,
    simulate,
)
from lightning_qrl.errors import UserError

app = typer.Typer(
    name="qrl",
    help="Reinforcement learning of language models in low precision.",
    epilog="Example: qrl fit --recipe 4bitter.yaml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("fit")(fit.fit)
app.command("ablate")(ablate.ablate)
app.command("compare")(compare.compare)
app.command("plan")(plan.plan)
app.command("inspect")(inspect.inspect)
app.command("sensitivity")(sensitivity.sensitivity)
app.command("simulate", cls=simulate.Simulate)(simulate.simulate)
app.command("doctor")(doctor.doctor)
app.add_typer(recipes.app, name="recipes")


def main() -> None:
    """The console script: bad input is one line on standard error and exit code 2."""
    try:
        app()
    except UserError as error:
        print(f"qrl: {error}", file=sys.stderr)
        sys.exit(2)
