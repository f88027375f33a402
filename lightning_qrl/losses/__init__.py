"""Policy losses: one file each, one function named like the file (see `base.Loss`)."""
