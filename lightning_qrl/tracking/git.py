"""Which code a run was made with."""

import subprocess
from pathlib import Path

from lightning_qrl.tracking.tags import GIT_COMMIT, GIT_DIRTY


def git_tags(folder: Path) -> dict[str, str]:
    """Commit of the checkout that a folder is in, and whether it has changes; empty outside one."""

    def git(*args: str) -> str | None:
        command = ["git", "-C", str(folder), *args]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None  # no git on this machine
        return done.stdout.strip() if done.returncode == 0 else None

    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain")
    if commit is None:
        return {}
    return {GIT_COMMIT: commit, GIT_DIRTY: str(bool(changes)).lower()}
