"""The ways of `qrl simulate`: the reference model, a cluster, a calibration; each loads its own."""
