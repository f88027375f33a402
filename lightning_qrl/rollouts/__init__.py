"""Rollout engines: one file each. An engine samples completions (see `base.RolloutEngine`)."""
