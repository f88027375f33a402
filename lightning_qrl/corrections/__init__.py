"""Corrections of what sampler and trainer differ in: one cure a file (see `stack.Corrections`)."""
