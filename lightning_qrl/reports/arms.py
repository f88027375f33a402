"""Sorting recorded runs into arms, and the runs of an arm by seed.

Runs of an ablation say which arm they are. Of other runs, those of one recipe (one hash) are an
arm, and of runs that were made by something else those that are named alike but for a trailing seed
(``lr3-seed0``, ``lr3_s1``) and whose parameters are equal, but for the seed and for where a run
keeps its files. Names that MLflow made up (``bold-fox-123``) say nothing: there the parameters do.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count

from lightning_qrl.tracking import tags
from lightning_qrl.tracking.notebook import RecordedRun, is_made_up

NAMED_SEED = re.compile(r"[-_ /.]+(?:seed|s)[-_= ]?(\d+)$", re.IGNORECASE)
OF_ONE_RUN = {"seed", "data_seed", "run_name", "run_id", "output_dir", "logging_dir"}  # parameters
TOLD_APART = 3  # parameters that a name may spell out
ENDED = ("FINISHED", "FAILED", "KILLED")


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm and its runs.

    Attributes:
        name: unique within a comparison.
        recipe: name of its recipe; empty if unknown.
        removed: callbacks that it leaves out.
        runs: by seed, ascending; failed and interrupted ones too.
        values: by a measure's key, by seed; a seed without the value has no entry. Finite, but that
            a gradient norm may be infinite.
        errors: by seed, the line that a failed run ended with.
    """

    name: str
    recipe: str
    removed: tuple[str, ...]
    runs: dict[int, RecordedRun]
    values: dict[str, dict[int, float]]
    errors: dict[int, str]

    @property
    def finished(self) -> dict[int, RecordedRun]:
        """The runs that came to their end, by seed: those whose numbers count."""
        return {seed: run for seed, run in self.runs.items() if run.status == "FINISHED"}

    @property
    def interrupted(self) -> list[int]:
        """Seeds of the runs that somebody stopped: they may go on, and say nothing yet."""
        return [seed for seed, run in self.runs.items() if run.status == "KILLED"]

    @property
    def planned(self) -> str:
        """Its name in the design of the ablation that it is of; else empty."""
        return next(iter(self.runs.values())).tags.get(tags.ARM, "")

    def known(self, key: str) -> dict[int, float]:
        """The finite values of a measure, by seed."""
        own = self.values.get(key, {})
        return {seed: value for seed, value in own.items() if math.isfinite(value)}

    def lost(self, key: str) -> int:
        """How many runs came to an end, of their own, without a finite value of a measure."""
        return len(self.runs) - len(self.interrupted) - len(self.known(key))


def gather(runs: Sequence[RecordedRun]) -> tuple[list[Arm], list[str]]:
    """Arms, in the order in which they were started, and what a reader must know about them.

    Runs that have not ended are left out.
    """
    ended = [run for run in runs if run.status in ENDED]
    going = [run.name for run in runs if run not in ended]
    notes = [f"Still running, and left out: {', '.join(going)}."] if going else []
    groups: dict[tuple[object, ...], list[RecordedRun]] = defaultdict(list)
    for run in sorted(ended, key=lambda run: run.started):
        groups[_key(run)].append(run)
    names = _distinct([own[0] for own in groups.values()])
    arms = []
    for name, own in zip(names, groups.values(), strict=True):
        by_seed, said = _by_seed(name, own)
        notes += said
        errors = {seed: _error(run) for seed, run in by_seed.items() if run.status == "FAILED"}
        removed = tuple(filter(None, own[0].tags.get(tags.REMOVED, "").split(",")))
        recipe = own[0].tags.get(tags.RECIPE, "")
        arms.append(Arm(name, recipe, removed, by_seed, {}, errors))
    return arms, notes


def seed_of(run: RecordedRun) -> int | None:
    """By its tag, its parameter, or its name; None if none of them tells it."""
    named = NAMED_SEED.search(run.name)
    told = (run.tags.get(tags.SEED), run.tags.get("seed"), run.params.get("seed"))
    for text in (*told, named and named[1]):
        if text and text.strip().isdecimal():
            return int(text)
    return None


def _key(run: RecordedRun) -> tuple[object, ...]:
    """Equal for the runs of one arm."""
    recipe_hash = run.tags.get(tags.RECIPE_HASH)
    if tags.ARM in run.tags:
        return ("arm", run.tags[tags.ARM], recipe_hash)
    if recipe_hash is not None:
        return ("recipe", recipe_hash)
    return ("name", _label(run), frozenset(_told(run).items()))


def _label(run: RecordedRun) -> str:
    own = run.tags
    if tags.ARM in own:
        return own[tags.ARM]
    if tags.RECIPE_HASH in own and own.get(tags.RECIPE):
        return own[tags.RECIPE]
    made_up = run.params and seed_of(run) is not None and is_made_up(run.name)
    return run.experiment if made_up else NAMED_SEED.sub("", run.name)


def _told(run: RecordedRun) -> dict[str, str]:
    """The parameters that make an arm what it is."""
    return {
        key: value
        for key, value in run.params.items()
        if re.split(r"[./]", key)[-1] not in OF_ONE_RUN
        and not key.startswith(("tracking.", "tracking/"))
    }


def _distinct(firsts: Sequence[RecordedRun]) -> list[str]:
    """A name for each arm, by its first run; those of one name are told apart by what differs."""
    alike: dict[str, list[int]] = defaultdict(list)
    for index, run in enumerate(firsts):
        alike[_label(run)].append(index)
    names = [_label(run) for run in firsts]
    for label, indices in alike.items():
        if len(indices) > 1:
            parts = _apart([firsts[index] for index in indices])
            for index, part in zip(indices, parts, strict=True):
                names[index] = f"{label}, {part}"
    return _unlike(names)


def _unlike(names: Sequence[str]) -> list[str]:
    """Names, of which those that are there already get a number."""
    unlike: dict[str, None] = {}
    for name in names:
        numbered = (f"{name} ({number})" for number in count(2))
        unlike[next(n for n in chain([name], numbered) if n not in unlike)] = None
    return list(unlike)


def _apart(runs: Sequence[RecordedRun]) -> list[str]:
    """What tells runs of one name apart: their recipes, a few parameters, or their hashes."""
    hashes = [run.tags.get(tags.RECIPE_HASH, run.id)[:8] for run in runs]
    keys = sorted({key for run in runs for key in _told(run)})
    differing = [key for key in keys if len({run.params.get(key) for run in runs}) > 1]
    spelled = [
        ", ".join(f"{key}={run.params.get(key, '(none)')}" for key in differing) for run in runs
    ]
    recipes = [run.tags.get(tags.RECIPE, "") for run in runs]
    for parts in (recipes, spelled if len(differing) <= TOLD_APART else [], hashes):
        if all(parts) and len(set(parts)) == len(runs):
            return parts
    return [run.id[:8] for run in runs]


def _by_seed(name: str, runs: Sequence[RecordedRun]) -> tuple[dict[int, RecordedRun], list[str]]:
    """The run that counts of each seed: the newest finished one, else the newest."""
    seeds, notes = [seed_of(run) for run in runs], []
    if None in seeds:
        seeds = list(range(len(runs)))
        notes = [
            f"The runs of {name} do not tell their seeds; they are counted in the order of their "
            "start, and pair by that."
        ] if len(runs) > 1 else []  # fmt: skip
    several: dict[int, list[RecordedRun]] = defaultdict(list)
    for seed, run in zip(seeds, runs, strict=True):
        assert seed is not None
        several[seed].append(run)
    doubled = sorted(seed for seed, own in several.items() if len(own) > 1)
    if doubled:
        notes.append(
            f"{name} was run more than once with seed {', '.join(map(str, doubled))}; the newest "
            "that finished counts."
        )
    return {seed: max(several[seed], key=_counts) for seed in sorted(several)}, notes


def _counts(run: RecordedRun) -> tuple[bool, float]:
    return run.status == "FINISHED", run.started


def _error(run: RecordedRun) -> str:
    steps = [int(history.steps[-1]) for history in run.metrics.values()]
    where = f" after step {max(steps)}" if steps else ""
    return run.tags.get(tags.ERROR) or f"failed{where}"
