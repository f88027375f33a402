"""The page's colours can be read, in light and in dark."""

import re
from importlib.resources import files

import numpy as np
import pytest


def colours(text: str) -> dict[str, str]:
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", text))


def luminance(colour: str) -> float:
    """Relative luminance, of WCAG 2."""
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    dark, light = sorted(luminance(colour) + 0.05 for colour in (one, other))
    return light / dark


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(scheme):
    style = (files("lightning_qrl.reports.page") / "page.css").read_text()
    light, dark = style.split("@media screen and (prefers-color-scheme: dark)")
    found = colours(light if scheme == "light" else dark)
    for paper in ("paper", "raised", "added", "dropped"):
        for ink in ("ink", "muted", "link", "worse", "better"):
            assert contrast(found[ink], found[paper]) >= 4.5, (ink, paper)
    for mark in ("blue", "vermilion"):
        assert contrast(found[mark], found["paper"]) >= 3  # of graphics
