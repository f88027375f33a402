"""Names that MLflow takes: none is refused, and no two that differ become one.

MLflow stores letters, digits and ``_ - . : / space``, up to 250 of them, that read as a plain path.
Any other character becomes ``_``, so ``a@b`` and ``a|b`` would both be ``a_b``. Whoever comes
second gets a digest of the whole name at its end. A run that is resumed must choose as before,
whatever comes first then: what was changed is kept in a file, which also tells what was meant.
"""

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from lightning_qrl.tracking.files import write_text
from lightning_qrl.tracking.reach import shown

KEY_LIMIT = 250  # characters of a name
VALUE_LIMIT = 6000  # characters of a parameter's value
TAG_LIMIT = 8000  # characters of a tag's value
EXPERIMENT_LIMIT, RUN_LIMIT = 500, 250  # characters of these names
FOLDER_LIMIT = 120  # bytes; file systems take 255, and a suffix follows
CUT = "... (cut; whole in recipe.yaml)"


class Names:
    """The keys of the names of one run.

    Args:
        file: keeps what was changed, by its key; None: nowhere.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._keys: dict[str, str] = {}
        self._names: dict[str, str] = {}
        if file is not None and file.exists():
            for key, name in json.loads(file.read_text(encoding="utf-8")).items():
                self._keys[name], self._names[key] = key, name

    def key(self, name: str) -> str:
        """The key of a name; always the same, and no other name's."""
        if name not in self._keys:
            key = mlflow_key(name)
            if key in self._names:
                digest = sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:8]
                key = f"{key[: KEY_LIMIT - 9]}_{digest}"
            self._keys[name], self._names[key] = key, name
            if key != name and self._file is not None:
                changed = {key: name for key, name in self._names.items() if key != name}
                write_text(self._file, json.dumps(changed, indent=1))
        return self._keys[name]


def mlflow_key(name: str) -> str:
    """A name that MLflow takes for a parameter or a metric: ``a@b`` becomes ``a_b``."""
    parts = (re.sub(r"[^\w\-. :]", "_", part).lstrip(".") for part in name.split("/"))
    return "/".join(part or "_" for part in parts)[:KEY_LIMIT].rstrip("/")


def mlflow_params(params: Mapping[str, Any]) -> dict[str, str]:
    """Parameters as MLflow takes them; a value that is cut says so."""
    names = Names()
    for name in params:  # a name that needs no change keeps itself
        if mlflow_key(name) == name:
            names.key(name)
    return {names.key(name): _cut(plain(shown(str(value)))) for name, value in params.items()}


def _cut(value: str) -> str:
    return value if len(value) <= VALUE_LIMIT else value[: VALUE_LIMIT - len(CUT)] + CUT


def plain(text: str) -> str:
    """A text that every database takes: what is no character is written as an escape."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")


def folder_name(run_name: str, suffix: str) -> str:
    """A name for a run's folder, whatever the characters of the run's name."""
    safe = re.sub(r"[^\w.-]+", "_", run_name).encode()[:FOLDER_LIMIT].decode(errors="ignore")
    return f"{safe}-{suffix}".lstrip(".")


def plain_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags as MLflow takes them."""
    return {plain(key)[:KEY_LIMIT]: plain(value)[:TAG_LIMIT] for key, value in tags.items()}


def check_names(experiment: str, run_name: str) -> None:
    """Raise ValueError for a name of an experiment or a run that MLflow refuses."""
    names = ("experiment", experiment, EXPERIMENT_LIMIT), ("run_name", run_name, RUN_LIMIT)
    for what, name, limit in names:
        if not name.strip():
            raise ValueError("experiment and run_name must not be empty")
        if len(name) > limit or plain(name) != name:
            said = f"expected a text of at most {limit} characters, got {plain(name[:40])}..."
            raise ValueError(f"{what}: {said}")
