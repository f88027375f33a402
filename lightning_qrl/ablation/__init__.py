"""Ablations: a design of arms and seeds, and the processes that carry it out.

`design` says what is run (pure), `conduct` runs it, `child` is the process of one run, `local` and
`ray` start such processes. Whatever of it is killed, the same command goes on where it was.
"""
