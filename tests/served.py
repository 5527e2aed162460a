"""`expertide serve demo` in a process of its own, for the tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from types import TracebackType

import psutil

MODEL = ("demo", "--context", "512")


class ServedDemo:
    """Starts on a free port and waits until it listens; `with` ends it."""

    def __init__(self, *arguments: str, model: tuple[str, ...] = MODEL, **env: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed on leaving
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EXPERTIDE_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "expertide", "serve", *model, "--port", "0", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            env=environment | env,
        )
        found = self.wait_for_log(r"listening on (http://\S+)")
        self.url = found[1]
        self.port = int(self.url.rpartition(":")[2])

    def __enter__(self) -> ServedDemo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            engine = self.engine()
            self.process.kill()
            self.process.wait(10)
            engine.wait(10)
        self._log.close()

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode("utf-8")

    def wait_for_log(self, pattern: str, timeout_s: float = 30) -> re.Match[str]:
        """The first match in what the server has written so far."""
        end = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.log())) is None:
            assert time.monotonic() < end, f"no {pattern!r} in:\n{self.log()}"
            assert self.process.poll() is None or re.search(pattern, self.log()), self.log()
            time.sleep(0.02)
        return found

    def engine(self) -> psutil.Process:
        """The engine's process."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 20) -> int:
        """Send a signal and wait; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)
