"""The last words of a run: what came of it, where it is, and how to look at it."""

from collections.abc import Mapping

from lightning_qrl.tracking import MLflowRun
from lightning_qrl.tracking.reach import shown


def summary(
    status: str,
    plan: str,
    evaluations: Mapping[int, Mapping[str, float]],
    run: MLflowRun,
    *,
    evaluates: bool,
) -> str:
    """A few lines for the terminal.

    Args:
        status: how the run ended.
        plan: one line on what was quantized.
        evaluations: held-out metrics by the number of optimizer steps.
        run: the run in MLflow; without an id it was stopped before it began.
        evaluates: whether the recipe has held-out evaluations.
    """
    lines = ["", f"{status.lower()}: {plan}", f"held-out reward  {_reward(evaluations, evaluates)}"]
    if not run.run_id:
        return "\n".join(lines)
    lines += [f"run     {run.run_name} (id {run.run_id})", f"folder  {run.run_folder}"]
    if run.uri.startswith(("http://", "https://")):
        lines.append(f"look    {shown(run.uri)}")
    else:
        lines.append(f"look    mlflow ui --backend-store-uri {shown(run.uri)}")
    if status != "FINISHED" and any((run.run_folder / "checkpoints").glob("*.ckpt")):
        lines.append(f"go on   qrl fit --resume {run.run_id}")
    return "\n".join(lines)


def _reward(evaluations: Mapping[int, Mapping[str, float]], evaluates: bool) -> str:
    """Before and after training, as far as it was measured."""
    steps = sorted({min(evaluations), max(evaluations)}) if evaluations else []
    measured = [f"{evaluations[step]['reward']:.3f} at step {step}" for step in steps]
    why = "" if evaluates else " (no held_out_evaluation)"  # else it was stopped before the first
    return "  ->  ".join(measured) or f"not measured{why}"
