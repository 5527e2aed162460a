"""Whatever is wrong with a model file, one clear sentence says so, soon and cheaply."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from broken_files import BROKEN, Broken, gguf_bytes
from expertide.errors import FormatError, StorageError
from expertide.formats import open_model

ROWS = [pytest.param(row, id=row.name) for row in BROKEN]
EVERYDAY = [pytest.param(row, id=row.name) for row in BROKEN if row.is_everyday]

MAX_SECONDS = 1.0
MAX_EXTRA_BYTES = 200 << 20


@pytest.mark.parametrize("row", ROWS)
def test_a_broken_file_is_refused_in_one_clear_sentence(row: Broken, tmp_path: Path) -> None:
    path = row.make(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises((FormatError, StorageError)) as caught:
            open_model(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert re.search(row.says, message), message
    assert "\n" not in message
    assert len(message) < 600
    # The name of the file at fault, wherever in the set it is.
    assert str(tmp_path) in message
    assert peak_bytes < MAX_EXTRA_BYTES


# Runs the program, then reports what only the process itself knows.
_WATCHED = """
import atexit, json, os, resource, runpy, sys
def report():
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = used.ru_utime + used.ru_stime
    with open(os.environ["REPORT"], "w") as file:
        json.dump({"torch": "torch" in sys.modules, "peak_bytes": used.ru_maxrss * 1024, "cpu_s": cpu_s}, file)
atexit.register(report)
runpy.run_module("expertide", run_name="__main__", alter_sys=True)
"""


class Watched:
    """One run of the program, and what it cost."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        report = folder / "report.json"
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", _WATCHED, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=60,
            env=os.environ | {"REPORT": str(report), "PYTHONIOENCODING": "utf-8"},
        )
        self.wall_s = time.perf_counter() - begin
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        facts = json.loads(report.read_text())
        self.cpu_s: float = facts["cpu_s"]
        self.peak_bytes: int = facts["peak_bytes"]
        self.has_torch: bool = facts["torch"]


def refuse_sound_file(folder: Path) -> Watched:
    """Refusing a sound file of an architecture nobody knows costs what starting the program costs."""
    path = folder / "sound.gguf"
    path.write_bytes(gguf_bytes().replace(b"deepseek2", b"nosuch-ai"))
    watched = Watched(folder, "inspect", str(path))
    assert watched.code == 1
    assert not watched.has_torch
    return watched


@pytest.fixture(scope="module")
def usual_peak_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    return refuse_sound_file(tmp_path_factory.mktemp("sound")).peak_bytes


@pytest.mark.parametrize("row", EVERYDAY)
@pytest.mark.parametrize("command", [("inspect",), ("run", "-p", "Hello")], ids=["inspect", "run"])
def test_the_program_refuses_a_broken_file_at_once(
    command: tuple[str, ...], row: Broken, tmp_path: Path, usual_peak_bytes: int
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    watched = Watched(tmp_path, command[0], str(row.make(folder)), *command[1:])
    assert watched.code == 1, watched.err
    assert watched.out == ""
    assert len(watched.err.splitlines()) == 1, watched.err
    assert re.search(row.says, watched.err), watched.err
    assert not watched.has_torch
    assert watched.peak_bytes < usual_peak_bytes + MAX_EXTRA_BYTES
    assert watched.cpu_s < MAX_SECONDS
    # On a busy machine the clock also counts the time of others: then the same start without a fault is the measure.
    if watched.wall_s >= MAX_SECONDS:
        assert watched.wall_s < 3 * refuse_sound_file(tmp_path).wall_s


def test_the_table_has_the_promised_twenty_everyday_faults() -> None:
    assert len(EVERYDAY) >= 20
    assert len({row.name for row in BROKEN}) == len(BROKEN)
