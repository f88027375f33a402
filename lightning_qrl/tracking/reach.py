"""Finding out within seconds, and before anything is written, whether a run can be recorded.

MLflow's own clients try a server or a database again for minutes before they give up.
"""

import os
import socket
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote, urlsplit

from lightning_qrl.errors import UserError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

ANSWER_SECONDS = 5.0
UNLOCKED_SECONDS = 1.0  # that a database may be busy for
PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}


def check_writable(folder: Path, remedy: str) -> None:
    """Try to make a folder and a file in it, and take away again what was made.

    Raises:
        UserError: that does not work.
    """
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"output folder {folder} cannot be written: {reason}; {remedy}") from None
    finally:
        for path in missing:
            if path.is_dir():
                path.rmdir()


@contextmanager
def one_line(uri: str) -> Iterator[None]:
    """Turns what MLflow raises into one line that names the server."""
    from alembic.util import CommandError  # a database that another version has migrated
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, CommandError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"MLflow at {uri}: {reason}") from error


def sqlite_file(uri: str) -> Path | None:
    """The file of a sqlite URI; None for any other."""
    if not uri.startswith("sqlite"):
        return None
    with one_line(uri):
        from sqlalchemy.engine import make_url

        database = make_url(uri).database
    return Path(database) if database and database != ":memory:" else None


@contextmanager
def alone(file: Path | None) -> Iterator[None]:
    """One process at a time: two that make the tables of a new database spoil it for each other."""
    if file is None or fcntl is None:
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def check_answers(uri: str) -> None:
    """Ask a server once, briefly: MLflow's own client would retry for minutes."""
    url = urlsplit(uri)
    file = sqlite_file(uri)
    if file is not None:
        _check_database(file, uri)
        return
    try:
        if url.scheme in ("http", "https"):
            import requests

            health = requests.get(f"{uri.rstrip('/')}/health", timeout=ANSWER_SECONDS)
            if health.status_code >= 500:
                health.raise_for_status()
        elif url.hostname and (port := url.port or PORTS.get(url.scheme.partition("+")[0])):
            socket.create_connection((url.hostname, port), timeout=ANSWER_SECONDS).close()
    except (OSError, ValueError) as error:  # what requests raises is an OSError too
        raise UserError(
            f"MLflow at {uri} does not answer ({type(error).__name__}); start it, or unset "
            "MLFLOW_TRACKING_URI to record in a local file"
        ) from error


def takes_writes(uri: str) -> bool:
    """Whether a server answers, and a sqlite file could be written; found out within seconds."""
    file = sqlite_file(uri)
    try:
        if file is None:
            check_answers(uri)
            return True
        # With sqlite's own functions alone: to close the file in another way would take from this
        # process the locks that it has on it.
        by_uri = f"file:{quote(str(file.absolute()))}?mode=rw"  # it is not made
        with closing(sqlite3.connect(by_uri, UNLOCKED_SECONDS, uri=True)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.rollback()
    except (UserError, sqlite3.Error):
        return False
    return True


def _check_database(file: Path, uri: str) -> None:
    if not file.exists():
        check_writable(file.parent, f"it is to hold {uri}")
        return
    try:
        with file.open("r+b") as opened:
            start = opened.read(16)
    except OSError as error:
        raise UserError(f"MLflow at {uri}: {error.strerror or error}") from None
    if start and start != b"SQLite format 3\0":
        raise UserError(f"MLflow at {uri}: the file is no sqlite database")
