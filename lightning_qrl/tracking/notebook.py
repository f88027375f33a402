"""Reading runs back from MLflow: tags, parameters, whole metric histories, texts."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class History(NamedTuple):
    """A metric over the steps of a run.

    Of a step that was logged twice the last value counts. Values may be NaN or infinite.
    """

    steps: NDArray[np.int64]  # [S], strictly increasing
    values: NDArray[np.float64]  # [S]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run as MLflow holds it, made by us or not.

    Attributes:
        id: the run's id.
        name: its name.
        experiment: name of its experiment.
        status: RUNNING, FINISHED, FAILED or KILLED.
        tags: its tags, those of MLflow too.
        params: its parameters.
        started: seconds since 1970.
        ended: the same; None while it runs.
        link: where its page is, if the server has pages; else empty.
        metrics: by name, those that were asked for and that it has.
        texts: artefacts by their paths, those that were asked for and that it has.
    """

    id: str
    name: str
    experiment: str
    status: str
    tags: dict[str, str]
    params: dict[str, str]
    started: float
    ended: float | None
    link: str = ""
    metrics: dict[str, History] = field(default_factory=dict, repr=False)
    texts: dict[str, str] = field(default_factory=dict, repr=False)
