"""The tags by which runs are found again in MLflow; a run's page shows them."""

RECIPE = "qrl.recipe"
RECIPE_HASH = "qrl.recipe_hash"  # of the resolved recipe, without its seed and section `tracking`
SEED = "qrl.seed"
FOLDER = "qrl.folder"
ERROR = "qrl.error"  # the one line that a failed run ended with
POLICY_SHA256 = "qrl.policy_sha256"  # of the weights that a run ended with
RESUMED_FROM = "qrl.resumed_from"
RERUN_OF = "qrl.rerun_of"

# Of ablations.
DESIGN = "qrl.design"  # the hash of a parent's design
PARENT = "qrl.parent"  # the parent's run id
MLFLOW_PARENT = "mlflow.parentRunId"  # the same, for MLflow's own page
ARM = "qrl.arm"
REMOVED = "qrl.removed"  # callbacks that an arm leaves out, with commas between
REPLACED_BY = "qrl.replaced_by"  # the run that was made instead of a broken one
