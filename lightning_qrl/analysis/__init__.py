"""Measurements: what low precision and staleness do to a policy."""
