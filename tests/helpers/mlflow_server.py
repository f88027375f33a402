"""A real tracking server, for tests that stop it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import requests


class Server:
    """A real `mlflow server`, at one port whenever it runs."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.folder = folder

    def start(self) -> None:
        command = [
            sys.executable, "-m", "mlflow", "server", "--port", str(self.port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self.folder}/server.db",
            "--artifacts-destination", str(self.folder / "served"),
        ]  # fmt: skip
        with (self.folder / "server.log").open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, cwd=self.folder
            )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                if requests.get(f"{self.uri}/health", timeout=2).ok:
                    return
            except OSError:
                time.sleep(0.3)
        raise TimeoutError((self.folder / "server.log").read_text()[-2000:])

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
