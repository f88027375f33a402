"""MLflow, and only here: one run of training is one run in MLflow."""

from lightning_qrl.tracking.git import git_tags
from lightning_qrl.tracking.run import MLflowRun, Status
from lightning_qrl.tracking.series import read_series

__all__ = ["MLflowRun", "Status", "git_tags", "read_series"]
