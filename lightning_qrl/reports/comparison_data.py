"""A comparison for scripts: JSON with all of it, CSV with a row an arm and measure."""

import csv
import io
import json
import math
import statistics
from dataclasses import asdict
from typing import Any

from lightning_qrl.reports.comparison import Arm, Comparison, Measure

COLUMNS = (
    "arm", "baseline", "measure", "unit", "scale", "seeds", "mean", "sd", "pairs", "difference",
    "low", "high", "p", "p_holm", "marked", "withheld",
)  # fmt: skip


def comparison_json(comparison: Comparison) -> str:
    """Runs, values by seed, differences and notes; a number that is not one is null."""
    arms = [
        {
            "name": arm.name,
            "compared_with": None if arm is comparison.baseline else comparison.reference(arm).name,
            "recipe": arm.recipe,
            "removed": list(arm.removed),
            "runs": {seed: _run(arm, seed) for seed in arm.runs},
            "values": {
                measure.key: {
                    **_summary(arm, measure),
                    "by_seed": arm.values[measure.key],
                    "difference": _difference(comparison, arm, measure),
                }
                for measure in comparison.measures
            },
        }
        for arm in comparison.arms
    ]
    whole = {
        "title": comparison.title,
        "baseline": comparison.baseline.name,
        "measures": [asdict(measure) for measure in comparison.measures],
        "arms": arms,
        "notes": list(comparison.notes),
    }
    return json.dumps(_plain(whole), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def comparison_csv(comparison: Comparison) -> str:
    """A row an arm and measure; what is not known is empty."""
    text = io.StringIO()
    rows = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    rows.writeheader()
    for arm in comparison.arms:
        for measure in comparison.measures:
            difference = _difference(comparison, arm, measure) or {}
            row = {
                **difference,
                "difference": difference.get("mean"),
                "arm": arm.name,
                "baseline": comparison.reference(arm).name,
                "measure": measure.key,
                "unit": measure.unit,
                "scale": measure.scale,
                **_summary(arm, measure),
            }
            rows.writerow(_plain(row))
    return text.getvalue()


def _run(arm: Arm, seed: int) -> dict[str, Any]:
    run = arm.runs[seed]
    return {
        "id": run.id,
        "name": run.name,
        "experiment": run.experiment,
        "status": run.status,
        "error": arm.errors.get(seed),
        "link": run.link or None,
    }


def _summary(arm: Arm, measure: Measure) -> dict[str, Any]:
    """Number of seeds with a value, their mean and standard deviation (ddof 1); of finite ones."""
    values = list(arm.values[measure.key].values())
    finite = len(arm.known(measure.key)) == len(values)
    return {
        "seeds": len(values),
        "mean": statistics.fmean(values) if values and finite else None,
        "sd": statistics.stdev(values) if len(values) > 1 and finite else None,
    }


def _difference(comparison: Comparison, arm: Arm, measure: Measure) -> dict[str, Any] | None:
    """To the baseline; of logarithms where the measure's scale is ``ratio``."""
    found = comparison.differences.get((arm.name, measure.key))
    return None if found is None else asdict(found)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
