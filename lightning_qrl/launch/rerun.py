"""Repeating a run from what MLflow holds of it: its recipe, and the tags of where it was made."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_qrl.errors import UserError
from lightning_qrl.launch.provenance import SESSIONS
from lightning_qrl.recipe import Recipe, recipe_from_yaml
from lightning_qrl.tracking import tags
from lightning_qrl.tracking.client import connect_to_read, find_run, tracking_uri
from lightning_qrl.tracking.reach import one_line, shown

RECIPE = "recipe.yaml"  # artefact


@dataclass(frozen=True, slots=True)
class Original:
    """A run to repeat.

    Attributes:
        run_id: its id.
        recipe: what it was made by, to be recorded where the run was found.
        tags: its tags.
        sessions: tags of where it was begun, and of where it was gone on with each time.
        datasets: digests of what it was trained and judged on, by split.
    """

    run_id: str
    recipe: Recipe
    tags: Mapping[str, str] = field(repr=False)
    sessions: Sequence[Mapping[str, str]] = field(default=(), repr=False)
    datasets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def differences(
        self, now: Mapping[str, str], datasets: Sequence[Mapping[str, str]]
    ) -> list[str]:
        """What differs in code, packages, data and machine, a line each; empty if nothing does.

        Args:
            now: the tags of this environment (`provenance.environment_tags`, `source_tags`).
            datasets: of the task as it is now (`provenance.datasets_of`).
        """
        sessions = [_facts(one) for one in self.sessions or (self.tags,)]
        before = [self._data() | one for one in sessions]
        data = {f"data of {one['context']}": one["digest"] for one in datasets}
        lines = list(_differences(before, data | _facts(now)))
        if now.get(tags.GIT_DIRTY) == "true" in [one.get("git_dirty") for one in sessions]:
            lines.append("unknown  both runs have changes that are in no commit")
        return lines

    def _data(self) -> dict[str, str]:
        return {f"data of {split}": digest for split, digest in self.datasets.items()}

    def verdict(self, policy_sha256: str) -> str:
        """Whether a repeated run has ended with the same weights, in a line.

        Args:
            policy_sha256: of the weights that it ended with; empty if it did not finish.
        """
        before = self.tags.get(tags.POLICY_SHA256)
        if before is None or not policy_sha256:
            which = "the rerun" if before else f"run {self.run_id}"
            return f"weights  cannot be compared: {which} has not ended with any"
        same = "the same as" if before == policy_sha256 else "other than"
        return f"weights  {same} those of run {self.run_id}"


def find_original(run: str, uri: str | None, overrides: Sequence[str]) -> Original:
    """The run that ``--rerun`` means.

    Args:
        run: its id, its name or its folder's name.
        uri: where to look for it; None for the usual server.
        overrides: of section ``tracking`` alone: with others it would be another run.

    Raises:
        UserError: there is no such run, it is none of ours, or an override changes it.
    """
    for override in overrides:
        if override.partition("=")[0].partition(".")[0] != "tracking":
            raise UserError(
                f"--rerun repeats a run as it was; {override} would make it another one: only "
                "tracking.* can be set (qrl fit --recipe takes any key)"
            )
    uri = tracking_uri(uri)
    client = connect_to_read(uri, run)
    found = find_run(client, uri, run)
    run_id, its_tags = found.info.run_id, found.data.tags
    if (before := its_tags.get(tags.RESUMED_FROM)) is not None:
        raise UserError(
            f"run {run} was continued from a checkpoint of run {before}, and --rerun begins at "
            f"step 0; continue that checkpoint again by this run's artefact {RECIPE}: "
            f"qrl fit --recipe {RECIPE} --resume {before}"
        )
    with one_line(uri), tempfile.TemporaryDirectory() as folder:
        there = [file.path for file in client.list_artifacts(run_id)]
        if RECIPE not in there:
            raise UserError(
                f"run {run} at {shown(uri)} has no artefact {RECIPE}: it cannot be repeated"
            )

        def read(artefact: str) -> str:
            return Path(client.download_artifacts(run_id, artefact, folder)).read_text("utf-8")

        text = read(RECIPE)
        sessions = json.loads(read(SESSIONS)) if SESSIONS in there else ()
        datasets = _datasets(client.get_run(run_id))
    name = its_tags.get(tags.RECIPE, "recipe")
    recipe = recipe_from_yaml(text, name, overrides, label=f"{RECIPE} of run {run}")
    if "uri" in recipe.values.get("tracking", {}):
        recipe.values["tracking"]["uri"] = uri
    return Original(run_id, recipe, its_tags, sessions, datasets)


def _datasets(run: Any) -> dict[str, str]:
    """Digests of a run's dataset inputs by their contexts."""
    inputs = run.inputs.dataset_inputs if run.inputs else []
    return {tag.value: one.dataset.digest for one in inputs for tag in one.tags}


def _facts(own: Mapping[str, str]) -> dict[str, str]:
    """What a repeated run should have alike, by what it is called in a message."""
    facts = {tag.removeprefix("qrl."): own[tag] for tag in tags.ENVIRONMENT if tag in own}
    sources = json.loads(own.get(tags.SOURCES, "{}"))
    return facts | {f"files of {key}": digest for key, digest in sources.items()}


def _differences(sessions: Sequence[Mapping[str, str]], now: Mapping[str, str]) -> Iterator[str]:
    for fact in dict.fromkeys([*now, *(fact for one in sessions for fact in one)]):
        was = list(dict.fromkeys(one.get(fact, "not recorded") for one in sessions))
        if was != [now.get(fact)]:
            yield f"differs  {fact}: was {', then '.join(was)}, is {now.get(fact, 'unknown')}"
