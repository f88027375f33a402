"""The one exception that means: the person can fix this, and here is what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_WORD, LONGEST = 300, 2000  # characters of a message; one may quote what a recipe says


class UserError(ValueError):
    """Bad input. Its text is one line that names the file, key or layer and the remedy.

    The command line prints it without a traceback and exits with code 2. What is too long to read
    is cut in the middle.
    """

    def __init__(self, message: str) -> None:
        words = (_cut(word, LONGEST_WORD) for word in message.split())
        super().__init__(_cut(" ".join(words), LONGEST))


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or the name of its type where it says nothing.

    A line that ends in a colon says nothing yet, so the next one comes with it.
    """
    first, *more = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first} {more[0].strip()}" if more and first.endswith(":") else first


def described(error: BaseException) -> str:
    """An error in one line: what a `UserError` says, else type and first line."""
    if isinstance(error, UserError):
        return str(error)
    kind, said = type(error).__name__, _cut(first_line(error), LONGEST // 4)
    return kind if said == kind else f"{kind}: {said}"


@contextmanager
def in_one_line(where: str) -> Iterator[None]:
    """Turn whatever is raised inside into a `UserError` that says where.

    For what other people's code may raise while it is looked at, before anything is written.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{where}: {described(error)}") from error


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}[...]{text[-most // 4 :]}"
