"""MLflow, and only here: one run of training is one run in MLflow."""

from lightning_qrl.tracking.git import git_tags
from lightning_qrl.tracking.run import MLflowRun, Status

__all__ = ["MLflowRun", "Status", "git_tags"]
