"""Tasks: one file each. A task is prompts with a verifiable reward (see `base.Task`)."""
