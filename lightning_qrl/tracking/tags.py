"""The tags by which runs are found again in MLflow; a run's page shows them."""

RECIPE = "qrl.recipe"
RECIPE_HASH = "qrl.recipe_hash"  # of the resolved recipe, without its seed and section `tracking`
SEED = "qrl.seed"
FOLDER = "qrl.folder"
ERROR = "qrl.error"  # the one line that a failed run ended with
POLICY_SHA256 = "qrl.policy_sha256"  # of the weights that a run ended with
RESUMED_FROM = "qrl.resumed_from"
RERUN_OF = "qrl.rerun_of"

# Where a run was made.
VERSION, PYTHON = "qrl.version", "qrl.python"
PACKAGES = {
    f"qrl.{name}": name for name in ("torch", "lightning", "transformers", "torchao", "mlflow")
}
DEVICE, THREADS = "qrl.device", "qrl.threads"
GIT_COMMIT, GIT_DIRTY = "qrl.git_commit", "qrl.git_dirty"
SOURCES = "qrl.sources"  # digests of what is neither ours nor a package, as JSON
ENVIRONMENT = (GIT_COMMIT, GIT_DIRTY, VERSION, PYTHON, *PACKAGES, DEVICE, THREADS)

# Of ablations.
KIND, ABLATION = "qrl.kind", "ablation"  # of a parent run
DESIGN = "qrl.design"  # the hash of a parent's design
PARENT = "qrl.parent"  # the parent's run id
MLFLOW_PARENT = "mlflow.parentRunId"  # the same, for MLflow's own page
ARM = "qrl.arm"
REMOVED = "qrl.removed"  # callbacks that an arm leaves out, with commas between
REPLACED_BY = "qrl.replaced_by"  # the run that was made instead of a broken one
