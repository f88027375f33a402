"""Asynchrony as an experimental factor: how old the weights are that a token was sampled with.

`settings` has the knobs, `schedule` says which weights sample which tokens of which completions,
`pipeline` samples and stores accordingly. docs/asynchrony.md tells it as a whole.
"""
