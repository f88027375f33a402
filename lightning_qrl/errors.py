"""The one exception that means: the person can fix this, and here is what to do."""


class UserError(ValueError):
    """Bad input. Its text is one line that names the file, key or layer and the remedy.

    The command line prints it without a traceback and exits with code 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
