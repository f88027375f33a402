"""Checkpoints that are whole or not there, and are checked to the last byte before they are used.

Written: to a file aside in the same folder, flushed to the disk, then renamed over the name. A kill
or a full disk at any moment leaves the last good checkpoint as it was; what was left aside is never
taken for a checkpoint, and is removed by the next save.

Read: torch's file is a zip archive with a CRC-32 of each record, which ``torch.load`` does not look
at when it maps the file into memory. It is computed here first, so a file that was cut short or
altered is refused. Only plain containers and tensors are loaded (``weights_only``): no code in the
file runs. (The recipe in it may name classes, which are imported like those of any recipe.)
"""

import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from typing_extensions import override

from lightning_qrl.analysis.nonfinite import first_nonfinite_tensor
from lightning_qrl.errors import UserError, first_line
from lightning_qrl.launch.disk import full_disk
from lightning_qrl.tracking import MLflowRun
from lightning_qrl.tracking.reach import shown

FOLDER = "checkpoints"  # of a run's folder
ASIDE = ".part"
UNREADABLE = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError)


class WholeCheckpoints(TorchCheckpointIO):
    """Lightning's way to read and write checkpoints, as the module's text says."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None
    ) -> None:
        """Write a checkpoint.

        Raises:
            UserError: the disk is full; the message names the last good checkpoint.
        """
        if "://" in str(path):  # object stores have no renaming, and need none
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        aside = path.with_name(f".{path.name}.{os.getpid()}{ASIDE}")
        try:
            _write(checkpoint, aside)
            os.replace(aside, path)
            _flush_folder(path.parent)
        except BaseException as error:
            aside.unlink(missing_ok=True)
            reason = full_disk(error)
            if reason is None:
                raise
            raise _no_room(f"checkpoint {path}", reason, path.parent) from error

    @override
    def load_checkpoint(
        self, path: _PATH, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; never more than plain containers and tensors."""
        if "://" in str(path):
            return super().load_checkpoint(path, weights_only=True)
        return read_checkpoint(Path(path))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint, mapped into memory on the CPU, if it is what was written.

    Raises:
        UserError: it was cut short or altered, or is no checkpoint.
    """
    try:
        _check_records(path)
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(saved, dict):
            raise TypeError(f"it holds a {type(saved).__name__}")
    except Exception as error:  # torch raises half a dozen kinds for a damaged file
        reason = first_line(error)
        for advice in (", please ", " This file can still"):  # torch's, for whoever wrote the file
            reason = reason.partition(advice)[0]
        raise UserError(f"checkpoint {path} is damaged or not written by qrl: {reason}") from error
    return saved


def read_sound(path: Path) -> dict[str, Any]:
    """A checkpoint that can be gone on from: whole, and its weights are finite.

    Raises:
        UserError: it is not.
    """
    saved = read_checkpoint(path)
    bad = first_nonfinite_tensor(saved.get("state_dict", {}).items())
    if bad is not None:
        raise UserError(f"checkpoint {path} holds weights that are not finite, first {bad}")
    return saved


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    files = {file: file.stat().st_mtime_ns for file in folder.glob("*.ckpt") if file.is_file()}
    return sorted(files, key=files.__getitem__, reverse=True)


def newest_sound(files: Iterable[Path]) -> Path | None:
    """The first of some files that can be gone on from."""
    for file in files:
        with suppress(UserError):
            read_sound(file)
            return file
    return None


def last_good(sound: Path | None) -> str:
    """A clause that names the newest sound one of a run's checkpoints."""
    said = "there is no checkpoint to go on from"
    return said if sound is None else f"the last good checkpoint is {sound}"


@contextmanager
def full_disk_in_one_line(record: MLflowRun) -> Iterator[None]:
    """Turn what a full disk makes any library raise into one line that names the run's folder.

    Raises:
        UserError: the disk is full.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = full_disk(error)
        if reason is None:
            raise
        what = f"run {record.run_name} in {record.run_folder}, recorded at {shown(record.uri)},"
        raise _no_room(what, reason, record.run_folder / FOLDER) from error


def _no_room(what: str, reason: str, folder: Path) -> UserError:
    good = last_good(newest_sound(newest_first(folder)))
    remedy = "make room and go on with qrl fit --resume"
    return UserError(f"{what} cannot be written: {reason}; {good}; {remedy}")


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed have left aside in a folder."""
    for file in folder.glob(f".*{ASIDE}"):
        writer = file.name.removesuffix(ASIDE).rpartition(".")[2]
        if writer == str(os.getpid()) or not _is_alive(writer):
            file.unlink(missing_ok=True)


def _is_alive(process: str) -> bool:
    if not process.isdigit():
        return True  # not ours to judge
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _write(checkpoint: dict[str, Any], file: Path) -> None:
    with file.open("wb") as opened:
        torch.save(checkpoint, opened)
        opened.flush()
        os.fsync(opened.fileno())


def _flush_folder(folder: Path) -> None:
    """Have the new name on the disk too; where a system cannot, it is renamed all the same."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _check_records(path: Path) -> None:
    """Raise ValueError where a record is not what its CRC-32 says."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except UNREADABLE as error:
        raise ValueError(str(error) or type(error).__name__) from None
    if damaged is not None:
        raise ValueError(f"its record {damaged} is not what was written")
