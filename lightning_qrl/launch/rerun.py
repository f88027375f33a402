"""Repeating a run from what MLflow holds of it: its recipe, and the tags of where it was made."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_qrl.errors import UserError
from lightning_qrl.recipe import Recipe, recipe_from_yaml
from lightning_qrl.tracking import tags
from lightning_qrl.tracking.client import connect_to_read, find_run, tracking_uri
from lightning_qrl.tracking.reach import one_line

RECIPE = "recipe.yaml"  # artefact


@dataclass(frozen=True, slots=True)
class Original:
    """A run to repeat.

    Attributes:
        run_id: its id.
        recipe: what it was made by, to be recorded where the run was found.
        tags: its tags.
    """

    run_id: str
    recipe: Recipe
    tags: Mapping[str, str] = field(repr=False)

    def differences(self, now: Mapping[str, str]) -> list[str]:
        """What differs in code, packages and machine, a line each; empty if nothing does.

        Args:
            now: the tags of this environment (`provenance.environment_tags`).
        """
        lines = [
            f"differs  {tag.removeprefix('qrl.')}: was {self.tags.get(tag, 'not recorded')}, "
            f"is {now.get(tag, 'unknown')}"
            for tag in tags.ENVIRONMENT
            if self.tags.get(tag) != now.get(tag)
        ]
        if self.tags.get(tags.GIT_DIRTY) == now.get(tags.GIT_DIRTY) == "true":
            lines.append("unknown  both runs have changes that are in no commit")
        return lines

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
    with one_line(uri), tempfile.TemporaryDirectory() as folder:
        if RECIPE not in [file.path for file in client.list_artifacts(run_id)]:
            raise UserError(f"run {run} at {uri} has no artefact {RECIPE}: it cannot be repeated")
        text = Path(client.download_artifacts(run_id, RECIPE, folder)).read_text(encoding="utf-8")
    name = its_tags.get(tags.RECIPE, "recipe")
    recipe = recipe_from_yaml(text, name, overrides, label=f"{RECIPE} of run {run}")
    if "uri" in recipe.values.get("tracking", {}):
        recipe.values["tracking"]["uri"] = uri
    return Original(run_id, recipe, its_tags)
