"""What the commands write: text as it comes, JSON files, notes, progress bars on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from expertide.errors import RequestError, StorageError


def note(text: str) -> None:
    """One or two lines on stderr. What a file or a template has put into them cannot drive the terminal."""
    print("\n".join(one_line(line) for line in text.splitlines()), file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    """`text` with "?" for control characters."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


class ReaderGoneError(Exception):
    """Whoever read our standard output has closed it (`| head`). Not a failure: they have what they wanted."""


def emit(text: str) -> None:
    """A piece of an answer on stdout, seen at once.

    Raises:
        ReaderGoneError: nobody reads any more. (Typer would turn a BrokenPipeError into exit code 1.)
        OSError: standard output takes no more, as on a full disk.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGoneError from None


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Two columns, the first padded. Names in a file can be anything, so control characters are shown as "?"."""
    rows = [(one_line(name), one_line(value)) for name, value in rows]
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


class JsonTarget:
    """`--json FILE` or `--json -`. Checked when made, so that a bad path fails before minutes of work."""

    def __init__(self, target: str | None) -> None:
        self.is_stdout = target == "-"
        self._path = None if target is None or self.is_stdout else Path(target)
        if self._path is not None:
            self._check(self._path)

    def __bool__(self) -> bool:
        return self.is_stdout or self._path is not None

    def write(self, value: Any) -> None:
        text = json.dumps(value, ensure_ascii=False, indent=1) + "\n"
        # A lone surrogate can only come from a prompt; it must not cost the whole result.
        data = text.encode("utf-8", errors="replace")
        if self.is_stdout:
            emit(data.decode("utf-8"))
        elif self._path is not None:
            try:
                self._path.write_bytes(data)
            except OSError as error:
                raise StorageError(f"{self._path}: cannot be written: {error.strerror}") from None

    @classmethod
    def _check(cls, path: Path) -> None:
        try:
            if path.is_dir():
                raise RequestError(f"--json {path}: is a directory, expected a file to write")
            if not path.absolute().parent.is_dir():
                raise RequestError(f"--json {path}: the directory {path.absolute().parent} does not exist")
            if not path.exists():
                # Whether it can be made is known when it was made: rights, names and file systems have many rules.
                path.open("xb").close()
                path.unlink()
            elif path.is_file():
                cls._check_overwritten(path)
        except OSError as error:
            raise StorageError(f"--json {path}: cannot be written: {error.strerror}") from None

    @staticmethod
    def _check_overwritten(path: Path) -> None:
        with path.open("r+b") as file:
            start = file.read(1)
        # Results are JSON objects; anything else that lies there is not ours to overwrite (a model, for one).
        if start not in (b"", b"{"):
            raise RequestError(f"--json {path}: exists and is no JSON object; it will not be overwritten")


class ProgressBars(AbstractContextManager["ProgressBars"]):
    """Bars on stderr while something long runs; nothing at all when stderr is no terminal.

    Call it with (what, done, total): a new `what` begins a new bar, `done == total` takes it away.
    """

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._bars: Any = None
        self._task: Any = None
        self._what = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._is_shown or total <= 0:
            return
        if what != self._what:
            self.close()
            if done >= total:  # over before it could be seen
                return
            self._open(what, total)
        self._bars.update(self._task, completed=done, total=total)
        if done >= total:
            self.close()

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
        self._bars, self._what = None, ""

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, what: str, total: int) -> None:
        # rich takes 60 ms to import; most calls end without a bar.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bars.add_task(what, total=total)
        self._what = what
        self._bars.start()
