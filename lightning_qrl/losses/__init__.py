"""Policy losses: one file each, one class named like the file (see `base.Loss`)."""
