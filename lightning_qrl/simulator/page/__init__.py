"""The reference model as one interactive page: a file that needs no server and no network.

``model.js`` is the model a second time, for the browser, without a number of its own: `values` puts
Python's constants on the page, and the tests hold the two against each other, event for event. The
page itself says whether they agree, on the presets whose outcomes Python wrote into it.

``summary.js`` is `summary` in the same way. ``page.html.j2`` lays the page out; ``settings.js``
reads and writes settings, ``picture.js`` draws, ``time.js`` plays, ``page.js`` connects them.

    write_page(Path("simulator.html"))
"""

import os
from importlib.resources import files
from pathlib import Path

from lightning_qrl.errors import UserError
from lightning_qrl.simulator.constants import POST, Constants
from lightning_qrl.simulator.page.controls import GROUPS, PRESET_WORDS
from lightning_qrl.simulator.page.values import page_values
from lightning_qrl.simulator.settings import Settings

__all__ = ["write_page"]

SCRIPTS = ("model.js", "summary.js", "settings.js", "picture.js", "time.js", "page.js")
START = Settings()


def write_page(file: Path, settings: Settings = START, constants: Constants = POST) -> None:
    """Write the page, whole or not at all.

    Args:
        file: where to.
        settings: what it starts with; its presets are in the system that these describe.
        constants: the numbers of its model.

    Raises:
        UserError: the file cannot be written.
    """
    aside = file.with_name(f".{file.name}.part")
    try:
        aside.write_text(_render(settings, constants), encoding="utf-8")
        os.replace(aside, file)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise UserError(f"page {file} cannot be written: {error.strerror}") from None


def _render(settings: Settings, constants: Constants) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    here = files(__package__)
    jinja = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    jinja.policies["json.dumps_kwargs"] = {}  # keys in their order
    values = page_values(settings, constants)
    return jinja.from_string((here / "page.html.j2").read_text("utf-8")).render(
        values=values,
        specs={spec["key"]: spec for spec in values["specs"]},
        groups=GROUPS,
        presets=PRESET_WORDS,
        of_the_post=constants == POST,
        style=Markup((here / "page.css").read_text("utf-8")),
        scripts=[Markup((here / name).read_text("utf-8")) for name in SCRIPTS],
    )
