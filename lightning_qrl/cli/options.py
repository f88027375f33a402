"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from lightning_qrl.errors import UserError

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


def check_file(option: str, file: Path, suffix: str) -> None:
    """Raise UserError if an option's file could not be written, before anything is done."""
    if file.suffix != suffix:
        raise UserError(f"{option} {file}: its name must end in {suffix}")
    if not file.parent.is_dir():
        raise UserError(f"{option} {file} cannot be written: there is no folder {file.parent}")
