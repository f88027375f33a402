"""A place where rollouts stay for a while, counted in two ways that must agree: Little's law.

    L = (1/T) ∫ N(t) dt       the mean number there, from the times at which it changes
    W = (1/n) Σ stays          of the n that came; a stay that the window's end cuts counts up to it
    λ = n / T

so L = λ W exactly, for every window that starts empty. Source: J. D. C. Little, "A Proof for the
Queuing Formula L = λW" (1961), with the window of the finite-time form.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Station:
    """Counts what comes and goes; times in nanoseconds.

    Attributes:
        number: there now.
        most: that were there at one time, for more than an instant.
        came: so far.
        area: the integral of ``number``.
        stays: of those that left, added up.
    """

    number: int = 0
    most: int = 0
    came: int = 0
    area: int = 0
    stays: int = 0
    _last: int = field(default=0, repr=False)

    def enter(self, now: int) -> None:
        """One comes."""
        self._pass(now)
        self.number += 1
        self.came += 1

    def leave(self, now: int, since: int) -> None:
        """One goes that came at ``since``."""
        self._pass(now)
        self.number -= 1
        self.stays += now - since

    def close(self, now: int, since: Iterable[int]) -> None:
        """The window ends; those that are still there came at these times."""
        self._pass(now)
        self.stays += sum(now - came for came in since)

    def _pass(self, now: int) -> None:
        if now > self._last:
            self.area += self.number * (now - self._last)
            self.most = max(self.most, self.number)
            self._last = now
