"""The artefacts of a run, which are files in its folder before MLflow gets a copy.

So a table or a log is added to without asking a server for what is in it, and the files of a run
whose server is away are there to be read.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_qrl.tracking.files import unwritable, write_text
from lightning_qrl.tracking.letters import ARTIFACTS

ADDED_TO = (".json", ".log")  # what a resumed run adds to


class Artifacts:
    """Artefacts by their paths.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / ARTIFACTS

    def path(self, artifact: str) -> Path:
        """The file of an artefact, there or not."""
        return self.folder / artifact

    def write(self, artifact: str, text: str) -> None:
        """Write a text, in place of an older one."""
        write_text(self.path(artifact), text)

    def append(self, artifact: str, line: str) -> None:
        """Add a line to a log.

        Raises:
            UserError: it cannot be written: the disk is full.
        """
        file = self.path(artifact)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8", errors="backslashreplace") as opened:
                opened.write(line + "\n")
        except OSError as error:
            raise unwritable(file, error) from error

    def add_rows(self, artifact: str, columns: Mapping[str, Sequence[Any]]) -> None:
        """Add rows to a table, in place of the rows of the same steps.

        (MLflow's own `log_table` appends, which doubles what a resumed run repeats, and reads the
        older rows back through pandas, which makes the completion ``"095"`` the number 95.)
        """
        names = list(columns)
        at = names.index("step")
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        steps = {row[at] for row in rows}
        file = self.path(artifact)
        there = json.loads(file.read_text(encoding="utf-8"))["data"] if file.exists() else []
        older = [row for row in there if row[at] not in steps]
        self.write(artifact, json.dumps({"columns": names, "data": older + rows}))

    def add_entry(self, artifact: str, entry: Any) -> None:
        """Add an entry to a list."""
        file = self.path(artifact)
        there = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
        self.write(artifact, json.dumps([*there, entry], indent=1))

    def bring_back(self, client: Any, run_id: str) -> None:
        """Get from MLflow what will be added to, if the folder has lost it."""
        for listed in client.list_artifacts(run_id):
            missing = not listed.is_dir and not self.path(listed.path).exists()
            if missing and listed.path.endswith(ADDED_TO):
                self.folder.mkdir(exist_ok=True)
                client.download_artifacts(run_id, listed.path, str(self.folder))
