"""The reference model's structure, its constants found from recorded runs.

`observed` is what is needed of a run, `runs` are many of them side by side. `trajectories` is the
model for many runs at once, `structure` its parts, `fit` the least squares, `goodness` the errors
on settings that were left out, `intervals` how sure the constants are. `calibrate` does all of it
in one call, `calibration` is the result, and `predict` its use.
"""

from lightning_qrl.simulator.calibrated.calibrate import calibrate
from lightning_qrl.simulator.calibrated.calibration import Calibration
from lightning_qrl.simulator.calibrated.observed import ObservedRun
from lightning_qrl.simulator.calibrated.predict import Prediction, predict

__all__ = ["Calibration", "ObservedRun", "Prediction", "calibrate", "predict"]
