"""Why MLflow did not take something: it may later, or it never will."""


class Unreachable(Exception):
    """MLflow is away, or cannot write; what was sent may be tried again."""


class Refused(Exception):
    """MLflow will never take what was sent."""
