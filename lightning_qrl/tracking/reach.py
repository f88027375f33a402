"""Finding out within seconds, and before anything is written, whether a run can be recorded.

MLflow's own clients try a server or a database again for minutes before they give up.
"""

import os
import re
import socket
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote, urlsplit

from lightning_qrl.errors import UserError, first_line

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

ANSWER_SECONDS = 5.0
UNLOCKED_SECONDS = 1.0  # that a database may be busy for
PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"  # seconds
BRIEF = {  # of MLflow's HTTP client, which by default tries for minutes
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
    TIMEOUT: "5",
}
UPLOAD_SECONDS = "120"  # until a server has stored a file of weights


def be_brief() -> None:
    """Have MLflow's HTTP client give up within seconds, for good; what the user has set stays."""
    for name, value in BRIEF.items():
        os.environ.setdefault(name, value)


@contextmanager
def patient() -> Iterator[None]:
    """A server may take its time to store what is large; what the user has set stays."""
    if os.environ.get(TIMEOUT) != BRIEF[TIMEOUT]:
        yield
        return
    os.environ[TIMEOUT] = UPLOAD_SECONDS
    try:
        yield
    finally:
        os.environ[TIMEOUT] = BRIEF[TIMEOUT]


def shown(uri: str) -> str:
    """A server's URI, or a text with one in it, without its password."""
    uri = re.sub(r"(://[^:/@?#\s]*:)[^?#\s]*@", r"\1***@", uri)
    return re.sub(r"(?i)([?&][^=&\s]*(?:pass|secret|token|key)[^=&\s]*=)[^&#\s]*", r"\1***", uri)


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
    except (OSError, ValueError) as error:  # a ValueError: a null byte is in it
        reason = getattr(error, "strerror", None) or error
        name = ascii(str(folder))[1:-1] if isinstance(error, ValueError) else folder
        raise UserError(f"output folder {name} cannot be written: {reason}; {remedy}") from None
    finally:
        for path in missing:
            if os.path.isdir(path):  # unlike Path.is_dir, it takes any name
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
        raise UserError(shown(f"MLflow at {uri}: {first_line(error)}")) from error


def sqlite_file(uri: str) -> Path | None:
    """The file of a sqlite URI; None for any other.

    Raises:
        UserError: it is no URI, or of a database in memory, which is gone when the run ends.
    """
    if not uri.startswith("sqlite"):
        return None
    with one_line(uri):
        from sqlalchemy.engine import make_url

        url = make_url(uri)
        url.get_dialect().import_dbapi()
    database = url.database or ":memory:"
    if database == ":memory:" or database.startswith("file:"):
        raise UserError(
            f"MLflow at {uri}: a database in memory keeps nothing; name a file, such as "
            "sqlite:///mlflow.db"
        )
    return Path(database)


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
    """Ask a server once, briefly: MLflow's own client would retry for minutes.

    Raises:
        UserError: it does not answer, or the URI is none.
    """
    file = sqlite_file(uri)
    if file is not None:
        _check_database(file, uri)
        return
    try:
        url = urlsplit(uri)
        port = url.port or PORTS.get(url.scheme.partition("+")[0])
    except ValueError as error:
        raise UserError(f"MLflow at {shown(uri)}: this is no URI: {error}") from None
    try:
        if url.scheme in ("http", "https"):
            import requests

            health = requests.get(f"{uri.rstrip('/')}/health", timeout=ANSWER_SECONDS)
            if health.status_code >= 500:
                health.raise_for_status()
        elif url.hostname and port:
            socket.create_connection((url.hostname, port), timeout=ANSWER_SECONDS).close()
    except (OSError, ValueError) as error:  # what requests raises is an OSError too
        raise UserError(
            f"MLflow at {shown(uri)} does not answer ({type(error).__name__}); start it, or unset "
            "MLFLOW_TRACKING_URI to record in a local file"
        ) from None


def takes_writes(uri: str) -> bool:
    """Whether a sqlite file could be written, found out in a second: MLflow would wait for 20.

    Of a server it is True: that is found out by trying.
    """
    file = sqlite_file(uri)
    if file is None:
        return True
    try:
        # With sqlite's own functions alone: to close the file in another way would take from this
        # process the locks that it has on it.
        by_uri = f"file:{quote(str(file.absolute()))}?mode=rw"  # it is not made
        with closing(sqlite3.connect(by_uri, UNLOCKED_SECONDS, uri=True)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.rollback()
    except sqlite3.Error:
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
