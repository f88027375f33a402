"""MLflow, and only here: one run of training is one run in MLflow.

Names are imported when they are asked for: what makes runs needs Lightning and torch, which whoever
only reads runs need not wait for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_qrl.tracking.git import git_tags
    from lightning_qrl.tracking.run import MLflowRun, Status
    from lightning_qrl.tracking.series import read_series

__all__ = ["MLflowRun", "Status", "git_tags", "read_series"]
HOMES = {"MLflowRun": "run", "Status": "run", "git_tags": "git", "read_series": "series"}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
