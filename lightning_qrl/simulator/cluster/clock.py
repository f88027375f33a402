"""SimPy's clock in whole nanoseconds: what is simultaneous is simultaneous, and sums are exact."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import simpy
from typing_extensions import override

SECOND = 1_000_000_000
LAST = 2  # priority of what comes after all else of its time; SimPy's own are 0 and 1


class Clock(simpy.Environment):
    """The time, and all that is to come."""

    @property
    @override
    def now(self) -> int:
        """In nanoseconds."""
        return self._now  # type: ignore[return-value]  # delays are whole

    def at_last(self, act: Callable[[Any], None]) -> None:
        """Act when all else of this time has happened."""
        _Last(self).callbacks.append(act)

    def run_until(self, done: simpy.Event) -> None:
        """Let time pass until that event."""
        with _without_collector():
            self.run(until=done)


class _Last(simpy.Event):
    def __init__(self, env: Clock) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        env.schedule(self, LAST)  # type: ignore[arg-type]


@contextmanager
def _without_collector() -> Iterator[None]:
    """Events that have happened leave no cycle of references, so there is nothing to collect."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
