"""The reference model as one interactive page: a file that needs no server and no network.

``model.js`` and ``dynamics.js`` are the model a second time, for the browser, without a number of
their own: `values` puts Python's constants on the page, and the tests hold the two against each
other, event for event. The page itself says whether they agree, on the presets whose outcomes
Python wrote into it.

``summary.js`` is `summary` in the same way. ``page.html.j2`` lays the page out; ``settings.js``
reads and writes settings, ``picture.js`` draws, ``words.js`` says it, ``time.js`` plays,
``page.js`` connects them.

    write_page(Path("simulator.html"))
"""

import os
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from lightning_qrl.errors import UserError
from lightning_qrl.simulator.page.controls import GROUPS, PRESET_WORDS
from lightning_qrl.simulator.page.values import check_fits, page_values
from lightning_qrl.simulator.settings import Settings

__all__ = ["write_page"]

SCRIPTS = ("dynamics.js", "model.js", "summary.js", "settings.js", "picture.js", "words.js",
           "time.js", "page.js")  # fmt: skip
START = Settings()


def write_page(file: Path, settings: Settings = START) -> None:
    """Write the page, whole or not at all.

    Args:
        file: where to.
        settings: what it starts with; its presets are in the system that these describe.

    Raises:
        UserError: the page cannot show the settings, or the file cannot be written.
    """
    check_fits(settings)
    aside = file.with_name(
        f".{os.getpid()}.part"
    )  # short: the name itself may be as long as can be
    try:
        aside.write_text(_render(settings), encoding="utf-8")
        os.replace(aside, file)
    except OSError as error:
        with suppress(OSError):  # it may be what could not be written
            aside.unlink()
        raise UserError(f"page {file} cannot be written: {error.strerror}") from None


def _render(settings: Settings) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    here = files(__package__)
    jinja = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    jinja.policies["json.dumps_kwargs"] = {}  # keys in their order
    values = page_values(settings)
    return jinja.from_string((here / "page.html.j2").read_text("utf-8")).render(
        values=values,
        specs={spec["key"]: spec for spec in values["specs"]},
        groups=GROUPS,
        presets=PRESET_WORDS,
        style=Markup((here / "page.css").read_text("utf-8")),
        scripts=[Markup((here / name).read_text("utf-8")) for name in SCRIPTS],
    )
