"""Numbers and names of a comparison as texts, for the terminal and for the page."""

import math
import re
from collections.abc import Callable, Sequence

from lightning_qrl.reports.differences import Difference
from lightning_qrl.reports.measures import Measure

MANY = 700.0  # its exponential is as large as a float may be
DIGITS = 4  # behind the point, at most; then powers of ten
RATIO_DIGITS = 7


def plain(text: str) -> str:
    """A text on one line, of characters that can be printed."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


def shortened(name: str, limit: int) -> str:
    """A name of at most so many characters; both of its ends tell arms apart, so both stay."""
    name = plain(name)
    if len(name) <= limit:
        return name
    head = math.ceil(0.6 * (limit - 1))
    return f"{name[:head].rstrip()}…{name[len(name) - (limit - 1 - head) :].lstrip()}"


def value_text(measure: Measure, values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds (of sample, ddof 1)."""
    if not values:
        return "–"
    mean = sum(values) / len(values)
    if not math.isfinite(mean):
        return "∞" if mean > 0 else "−∞"
    if len(values) == 1:
        return measure.form.format(mean)
    apart = math.hypot(*(value - mean for value in values))  # unlike a sum, does not overflow
    deviation = apart / math.sqrt(len(values) - 1)
    return f"{measure.form.format(mean)} ± {measure.form.format(deviation)}"


def difference_text(measure: Measure, difference: Difference | None) -> str:
    """Mean and interval: ``+0.012 [−0.003, +0.027]``, of a ratio ``×1.30 [1.10, 1.54]``.

    With more digits than usual where an end that is not zero (of a ratio, not 1) would read as it.
    """
    if difference is None or math.isnan(difference.mean):
        return "no pair"
    if math.isnan(difference.low) or math.isnan(difference.high):
        return signed(measure, difference.mean)
    ends = (difference.mean, difference.low, difference.high)
    apart = not difference.low <= 0 <= difference.high
    form = _form(measure, min(map(abs, ends)) if apart else max(map(abs, ends)))
    middle, low, high = (form(end) for end in ends)
    return f"{middle} [{low.lstrip('×')}, {high.lstrip('×')}]"


def signed(measure: Measure, value: float) -> str:
    """One difference: ``+0.012``, ``×1.30``."""
    return _form(measure, abs(value))(value)


def _form(measure: Measure, least: float) -> Callable[[float], str]:
    """What writes differences of a measure, the least of which must not read as none."""
    behind = math.ceil(-math.log10(least)) if least > 0 else 0  # its first digit's place
    if measure.scale == "ratio":
        digits = min(max(3, behind + 1), RATIO_DIGITS)
        return lambda value: f"×{math.exp(value):#.{digits}g}".rstrip(".") if value < MANY else "×∞"
    form = measure.form.replace("{:", "{:+", 1)
    usual = re.fullmatch(r"\{:\+,?\.(\d)f\}", form)
    if usual and behind > int(usual[1]):
        form = f"{{:+.{behind}f}}" if behind <= DIGITS else "{:+.1e}"
    return lambda value: form.format(value).replace("-", "−")
