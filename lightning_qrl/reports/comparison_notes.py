"""What a reader of a comparison must know before concluding, a sentence each."""

from collections.abc import Iterator, Mapping, Sequence

from lightning_qrl.reports.arms import Arm
from lightning_qrl.reports.differences import LEVEL, Difference
from lightning_qrl.reports.measures import HELD_OUT, TRAINING, Measure
from lightning_qrl.tracking import tags

SHOWN = 4  # arms that a note names


def notes_on(
    arms: Sequence[Arm],
    measures: Sequence[Measure],
    differences: Mapping[tuple[str, str], Difference],
    references: Mapping[str, Arm],
) -> Iterator[str]:
    """The notes, those that forbid a conclusion first.

    Args:
        arms: measured; the baseline first.
        measures: what was measured.
        differences: by an arm's name and a measure's key.
        references: by an arm's name, what it is compared with.
    """
    yield from _on_pairs(arms, differences, references)
    yield from _on_withheld(arms, measures, differences, references)
    yield from _on_copies(arms, measures, differences)
    yield from _on_failures(arms)
    yield from _on_missing(arms, measures)
    yield from _on_sameness(arms)
    yield from _on_method(arms, measures, references)


def _on_pairs(
    arms: Sequence[Arm],
    differences: Mapping[tuple[str, str], Difference],
    references: Mapping[str, Arm],
) -> Iterator[str]:
    others = arms[1:]
    if not others:
        yield f"There is one arm, {arms[0].name}: nothing to compare it with."
    for base in {arm.name: arm for arm in references.values()}.values():
        own = [arm for arm in others if references[arm.name] is base]
        most = {
            arm.name: max((d.pairs for (name, _), d in differences.items() if name == arm.name),
                          default=0)
            for arm in own
        }  # fmt: skip
        few = [name for name, count in most.items() if count < 2]
        which = "the baseline" if base is arms[0] else base.name
        about = "" if len(few) == len(others) else f" about {_listed(few)}"
        if not base.finished:
            named = "" if base.name == which else f" {base.name}"
            yield f"Nothing can be concluded{about}: no run of {which}{named} finished."
        elif few and not about:
            yield (
                f"Nothing can be concluded: no arm has two seeds in common with {which}, and one "
                "pair of runs does not tell a difference from chance. Run more seeds."
            )
        elif few:
            yield (f"Nothing can be concluded{about}: fewer than two seeds in common with {which}.")


def _on_withheld(
    arms: Sequence[Arm],
    measures: Sequence[Measure],
    differences: Mapping[tuple[str, str], Difference],
    references: Mapping[str, Arm],
) -> Iterator[str]:
    """Differences that would have a star, if the arm had not lost seeds."""
    for arm in arms[1:]:
        of = [m for m in measures if differences[arm.name, m.key].withheld]
        if of:
            lost = max(arm.lost(measure.key) for measure in of)
            yield (
                f"No star for {arm.name} in {_listed([measure.label for measure in of])}: it lost "
                f"{lost} of its {_counted(len(arm.runs), 'seed')}, more than "
                f"{references[arm.name].name} did, and those that survived flatter it."
            )


def _on_copies(
    arms: Sequence[Arm],
    measures: Sequence[Measure],
    differences: Mapping[tuple[str, str], Difference],
) -> Iterator[str]:
    """Arms whose differences have no spread: copies of runs, or a measure of few values."""
    for arm in arms[1:]:
        alike = [
            measure.label
            for measure in measures
            if (d := differences[arm.name, measure.key]).pairs > 1 and d.low == d.high != 0
        ]
        if alike:
            yield (
                f"Every seed of {arm.name} differs by the same in {_listed(alike)}: no spread to "
                "judge by, so a star takes 6 seeds (sign-flip test)."
            )


def _on_failures(arms: Sequence[Arm]) -> Iterator[str]:
    """Runs that came to no end of their own."""
    failed = [f"{arm.name} ({len(arm.errors)} of {len(arm.runs)})" for arm in arms if arm.errors]
    if failed:
        survived = any(arm.errors and arm.finished for arm in arms)
        yield f"Runs that failed have no numbers: {_listed(failed)}." + (
            " What is shown of such an arm is of the runs that survived, which flatters it."
            if survived
            else ""
        )
    stopped = [
        f"{arm.name} ({len(arm.interrupted)} of {len(arm.runs)})" for arm in arms if arm.interrupted
    ]
    if stopped:
        yield f"Runs that were interrupted have no numbers yet: {_listed(stopped)}."


def _on_missing(arms: Sequence[Arm], measures: Sequence[Measure]) -> Iterator[str]:
    """Finished runs in which a measure has no value, or none that is finite."""
    for measure in measures:
        lacking = [
            f"{arm.name} ({missing} of {len(arm.finished)})"
            for arm in arms
            if (missing := len(arm.finished) - len(arm.known(measure.key)))
        ]
        if lacking and measure.key == "steps_to_threshold":
            yield (
                f"Never reached, and so left out of {measure.label}: {_listed(lacking)}; that "
                "column is of those that got there."
            )
        elif lacking and measure.key == "largest_grad_norm":
            yield (
                f"The gradient was not finite at some step: {_listed(lacking)}; in {measure.label} "
                "such runs do not pair, and a mean over them is infinite."
            )
        elif lacking:
            yield f"No finite value of {measure.label}: {_listed(lacking)}; these are left out."


def _on_sameness(arms: Sequence[Arm]) -> Iterator[str]:
    """Differences between runs that are not the arms' own."""
    runs = [run for arm in arms for run in arm.finished.values()]
    steps = {
        int(max(history.steps[-1] for name, history in run.metrics.items() if name in lengths))
        for run in runs
        if (lengths := run.metrics.keys() & {HELD_OUT, TRAINING})
    }
    if len(steps) > 1:
        yield f"Runs are of different lengths: {min(steps)} to {max(steps)} steps."
    commits = {run.tags[tags.GIT_COMMIT][:8] for run in runs if tags.GIT_COMMIT in run.tags}
    if len(commits) > 1:
        yield f"Runs were made by different code: commits {', '.join(sorted(commits))}."


def _on_method(
    arms: Sequence[Arm], measures: Sequence[Measure], references: Mapping[str, Arm]
) -> Iterator[str]:
    if len(arms) < 2 or not measures:
        return
    by_level = any(arm is not arms[0] for arm in references.values())
    to = "the full arm of the same factors, of full arms to " if by_level else ""
    yield (
        f"Differences are to {to}{arms[0].name}, paired by seed, with 95% bootstrap intervals over "
        "seeds. A star: the interval excludes zero, and p of a paired t-test is below "
        f"{LEVEL:g} after Holm's correction for {_counted(len(arms) - 1, 'arm')}. Nothing is "
        f"corrected for the {_counted(len(measures), 'measure')}: decide beforehand which counts."
    )
    keys = {measure.key: measure for measure in measures}
    if "steps_to_threshold" in keys:
        steps = keys["steps_to_threshold"]
        yield f"{steps.label[0].upper()}{steps.label[1:]}: {steps.about}."
    elif "held_out_reward" in keys and arms[0].known("held_out_reward"):
        yield (
            "Steps to a threshold are not shown: the baseline's held-out reward does not rise, so "
            "that it sets none; --threshold does."
        )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
