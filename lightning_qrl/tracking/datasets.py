"""What a run was trained and judged on, as MLflow's dataset inputs: one of each split of its task.

The digest is over the prompts and their answers, so that two runs with one digest have seen the
same task, whatever its name and arguments.
"""

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

DIGEST = 16  # hex digits; MLflow takes 36
SOURCE_LIMIT = 65_535  # characters that MLflow takes
NAME_LIMIT = 500
CONTEXT = "mlflow.data.context"  # MLflow's tag for what a run did with a dataset


def dataset(
    task: str, arguments: Mapping[str, Any], split: str, prompts: Iterable[tuple[str, str]]
) -> dict[str, str]:
    """A split of a task, described.

    Args:
        task: its name.
        arguments: what it was made with.
        split: ``train`` or ``held_out``.
        prompts: each prompt's text and answer, in order.
    """
    digest, count = sha256(), 0
    for text, answer in prompts:
        digest.update(json.dumps([text, answer]).encode())
        count += 1
    source = json.dumps({"task": task, "arguments": dict(arguments)}, default=str)
    return {
        "name": f"{task}/{split}"[:NAME_LIMIT],
        "digest": digest.hexdigest()[:DIGEST],
        "source_type": "qrl task",
        "source": source[:SOURCE_LIMIT],
        "profile": json.dumps({"num_prompts": count}),
        "context": split,
    }


def deliver_datasets(client: Any, run_id: str, folder: Path, letter: dict[str, Any]) -> None:
    """Tell MLflow of datasets; those that the run has already stay as they are."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for described in letter["values"]:
        fields = {name: value for name, value in described.items() if name != "context"}
        tags = [InputTag(CONTEXT, described["context"])]
        inputs.append(DatasetInput(Dataset(**fields), tags))
    client.log_inputs(run_id, inputs)
