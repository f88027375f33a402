"""Why MLflow did not take something: it may later, or it never will."""


class Unreachable(Exception):
    """MLflow is away, or cannot write; what was sent may be tried again."""


class Failed(Unreachable):
    """MLflow answered that it failed: at this letter, or at all that it is sent now."""


class Refused(Exception):
    """MLflow will never take what was sent."""
