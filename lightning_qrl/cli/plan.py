"""`qrl plan`: what each layer will compute in."""

from lightning_qrl.cli.options import Overrides, RecipeName, Without
from lightning_qrl.cli.quiet import quiet_imports


def plan(recipe: RecipeName, overrides: Overrides = None, without: Without = None) -> None:
    """Print what each linear layer will compute in; nothing is trained.

    Example: qrl plan --recipe 4bitter.yaml --without sensitive_weights
    """
    from lightning_qrl.recipe import load_recipe

    chosen = load_recipe(recipe, overrides or (), without or ())
    from rich.console import Console

    with quiet_imports():
        from lightning_qrl.build import build
        from lightning_qrl.launch import rehearse
        from lightning_qrl.reports.plan import PLAIN, plan_table, plan_text

    run = build(chosen)
    resolved = rehearse(run)
    console = Console()
    if console.is_terminal:
        console.print(plan_table(resolved.table()))
    else:
        print(plan_text(resolved.table()), end="")
    precision = run.trainer_args.get("precision", "32-true")
    print(f"{resolved.summary()}; {PLAIN} computes in trainer.precision ({precision})")
