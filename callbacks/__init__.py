"""Callbacks: one ingredient of a run each, one file each; recipes name them by their file."""
