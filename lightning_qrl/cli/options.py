"""Options that several commands share."""

from typing import Annotated

import typer

RecipeName = Annotated[
    str, typer.Option("--recipe", "-r", help="A recipe: a shipped name or a path.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides.")
]
Without = Annotated[
    list[str] | None,
    typer.Option("--without", metavar="KEY", help="Leave out a callback; may be repeated."),
]
