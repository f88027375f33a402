"""What a run tells MLflow, as letters: plain containers that can wait on a disk.

    params    values {key: text}
    metrics   values [[key, value, milliseconds since 1970, step], ...]
    tags      values {key: text}
    file      path: an artefact, a file in the run's folder ``artifacts``
    datasets  values [...]   (`datasets`)
    model     folder, name, step, ...   (`models`)
    status    status, at (milliseconds since 1970)

Delivering a letter twice is delivering it once, since one never knows whether a server that did not
answer has heard. Parameters, tags, files and the status are set to what they are already. The
primary key of a metric in MLflow's tables is (key, timestamp, step, run, value), so a letter that
keeps its timestamps adds nothing the second time. Datasets and models are looked for first.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_qrl.errors import described, first_line
from lightning_qrl.tracking.datasets import deliver_datasets
from lightning_qrl.tracking.models import deliver_model
from lightning_qrl.tracking.reach import shown
from lightning_qrl.tracking.refusals import Failed, Refused, Unreachable
from lightning_qrl.tracking.tags import FOLDER

Letter = dict[str, Any]

ARTIFACTS = "artifacts"  # in a run's folder
STORED = ("file", "model")  # kinds that go to the artefact store, which may be another machine
PER_BATCH = 100  # parameters or tags that MLflow takes at once
METRICS_PER_BATCH = 1000
REQUEST_LIMIT = 400_000  # characters; MLflow's is a million bytes, after JSON's escapes
FINAL = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE")
AWAY = ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")  # such as a database that is locked


def deliver(client: Any, run_id: str, folder: Path, letter: Letter) -> None:
    """Tell MLflow what a letter says, or find out within seconds that it is away.

    A letter that MLflow fails at while it takes another one is refused. Not so one for the artefact
    store: that may be away while MLflow is there.

    Args:
        client: MLflow's.
        run_id: the run.
        folder: the run's folder.
        letter: see the module's text.

    Raises:
        Unreachable: MLflow or its artefact store is away; the letter may be tried again.
        Refused: MLflow will never take the letter.
    """
    try:
        _attempt(client, run_id, folder, letter)
    except Failed:
        check_takes_letters(client, run_id, folder)
        try:
            _attempt(client, run_id, folder, letter)
        except Failed as error:
            raise Refused(str(error)) from error


def check_takes_letters(client: Any, run_id: str, folder: Path) -> None:
    """Tell MLflow what it knows already.

    Raises:
        Unreachable: it does not take it.
    """
    _attempt(client, run_id, folder, {"kind": "tags", "values": {FOLDER: str(folder)}})


def _attempt(client: Any, run_id: str, folder: Path, letter: Letter) -> None:
    """Raises what MLflow raises as what can be tried again and what cannot."""
    try:
        DELIVER[letter["kind"]](client, run_id, folder, letter)
    except Refused:
        raise
    except Exception as error:  # a letter may be damaged, and stores raise what they like
        told = _why_not(error)
        damaged = isinstance(error, (KeyError, TypeError))
        if letter["kind"] in STORED and isinstance(told, Failed) and not damaged:
            told = Unreachable(str(told))
        raise told from error


def _why_not(error: Exception) -> Refused | Unreachable:
    import requests
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    line = shown(first_line(error))
    if isinstance(error, MlflowException):
        if error.error_code in FINAL:
            return Refused(line)
        unheard = requests.exceptions.ConnectionError, requests.exceptions.Timeout
        away = error.error_code in AWAY or isinstance(error.__context__, unheard)
        return Unreachable(line) if away else Failed(line)
    if isinstance(error, (OSError, SQLAlchemyError)):  # what requests raises is an OSError too
        return Unreachable(line)
    return Failed(described(error))


def _params(client: Any, run_id: str, folder: Path, letter: Letter) -> None:
    from mlflow.entities import Param

    for batch in _batches(letter["values"]):
        client.log_batch(run_id, params=[Param(key, value) for key, value in batch.items()])


def _tags(client: Any, run_id: str, folder: Path, letter: Letter) -> None:
    from mlflow.entities import RunTag

    for batch in _batches(letter["values"]):
        tags = [RunTag(key, value) for key, value in batch.items()]
        client.log_batch(run_id, tags=tags)


def _metrics(client: Any, run_id: str, folder: Path, letter: Letter) -> None:
    from mlflow.entities import Metric

    values = iter(letter["values"])
    while batch := [Metric(*entry) for entry in islice(values, METRICS_PER_BATCH)]:
        client.log_batch(run_id, metrics=batch)


def _file(client: Any, run_id: str, folder: Path, letter: Letter) -> None:
    file = folder / ARTIFACTS / letter["path"]
    if not file.exists():
        raise Refused(f"{file} is gone")
    place = os.path.dirname(letter["path"])
    client.log_artifact(run_id, str(file), place or None)


def _status(client: Any, run_id: str, folder: Path, letter: Letter) -> None:
    client.set_terminated(run_id, status=letter["status"], end_time=letter["at"])


DELIVER: dict[str, Callable[[Any, str, Path, Letter], None]] = {
    "params": _params,
    "tags": _tags,
    "metrics": _metrics,
    "file": _file,
    "status": _status,
    "datasets": deliver_datasets,
    "model": deliver_model,
}


def _batches(values: Mapping[str, str]) -> Iterator[dict[str, str]]:
    batch: dict[str, str] = {}
    size = 0
    for key, value in values.items():
        length = len(ascii(value)) + len(ascii(key))
        if batch and (len(batch) == PER_BATCH or size + length > REQUEST_LIMIT):
            yield batch
            batch, size = {}, 0
        batch[key] = value
        size += length
    if batch:
        yield batch


def merged(letters: Iterable[tuple[Letter, int]]) -> Iterator[tuple[Letter, int]]:
    """The same letters, each with where it ends, but metrics that follow one another as one."""
    waiting: tuple[Letter, int] | None = None
    for letter, end in letters:
        if waiting is not None and waiting[0]["kind"] == letter["kind"] == "metrics":
            together = waiting[0]["values"] + letter["values"]
            if len(together) <= METRICS_PER_BATCH:
                waiting = {"kind": "metrics", "values": together}, end
                continue
        if waiting is not None:
            yield waiting
        waiting = letter, end
    if waiting is not None:
        yield waiting
