"""`qrl sensitivity`: which layers to keep in BF16."""

from pathlib import Path
from typing import Annotated

import typer

from lightning_qrl.cli.options import Overrides, RecipeName, Without
from lightning_qrl.cli.quiet import quiet_imports
from lightning_qrl.errors import UserError


def sensitivity(
    recipe: RecipeName,
    overrides: Overrides = None,
    without: Without = None,
    completions: Annotated[
        int, typer.Option(help="How many to sample from the policy and score.")
    ] = 256,
    target: Annotated[
        float, typer.Option(help="Share of the mean |Δlogprob| to take off, above 0 to 1.")
    ] = 0.5,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The figure; sensitivity-RECIPE.png.")
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a recipe that keeps the chosen layers in BF16."),
    ] = None,
) -> None:
    """Rank layer groups by what quantizing them costs in |Δlogprob|, against bytes.

    Only layers that the recipe quantizes are ranked: leave out the callbacks that keep layers.

    Example: qrl sensitivity --recipe 4bitter.yaml --without bf16_tail --without sensitive_weights
    """
    if completions < 2:
        raise UserError(f"--completions must be at least 2, got {completions}")
    if not 0 < target <= 1:
        raise UserError(f"--target must be above 0 and at most 1, got {target}")
    from lightning_qrl.recipe import load_recipe

    chosen_recipe = load_recipe(recipe, overrides or (), without or ())
    with quiet_imports():
        from lightning_qrl.launch.extend import check_new, write_protected
        from lightning_qrl.launch.sensitivity import prepare
        from lightning_qrl.reports import sensitivity as report
        from lightning_qrl.reports.figures import check_figure

    file = figure or Path(f"sensitivity-{chosen_recipe.name}.png")
    check_figure(file)
    if write is not None:
        check_new(write)
    from rich.console import Console

    with Console(stderr=True).status("quantizing one group of layers after another"):
        measured, groups = prepare(chosen_recipe, completions)
        ranking, walk = measured.rank(), measured.walk()
        chosen = measured.choose(walk, target)
    print(f"recipe {chosen_recipe.name}: {report.headline(measured)}\n")
    print(report.ranking_text(ranking))
    print("\n".join([*report.ends_text(measured), "", report.walk_text(walk)]))
    print(f"chosen  {report.choice_text(chosen, walk)}")
    report.draw_sensitivity(file, f"Sensitivity of {chosen_recipe.name}", ranking, walk, chosen)
    print(f"figure  {file}")
    if write is not None:
        by_name = {group.name: group.select for group in groups}
        select = [selector for name in chosen.groups for selector in by_name[name]]
        said = f"{chosen_recipe.name} with {report.choice_text(chosen, walk)}."
        write_protected(write, recipe, chosen_recipe, without or (), select, said)
        print(f"recipe  {write}")
