"""The program `expertide`: finds the command, runs it, and turns what goes wrong into a line and an exit code.

Only names of the standard library are imported at the top: a Ctrl-C while the rest is being imported (half a second on
a slow machine) must end as quietly as any other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
# What a disk says that takes no more.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; always ends in SystemExit."""
    try:
        code = run_command(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:
        # A second Ctrl-C, or one before anything had begun.
        code = _interrupted()
    if code == INTERRUPTED:
        # CPython up to 3.13 remembers a KeyboardInterrupt that passed through exec(), as imports of dataclasses do,
        # and then dies of SIGINT at exit although it was handled. Everything is closed by now, so leave without it.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(INTERRUPTED)
    # The answer is out: a Ctrl-C that comes while the interpreter takes itself down must not turn it into a failure.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def run_command(arguments: list[str]) -> int:
    """Run one command line; the exit code."""
    # Standard streams that the caller has closed are None here, and the next file to be opened would get their number.
    if sys.stderr is None:
        sys.stderr = _to_nowhere(2)
    if sys.stdout is None:
        print("expertide: standard output is closed; to run without an answer, send it to /dev/null", file=sys.stderr)
        return FAILED
    import typer

    from expertide.cli.commands import app
    from expertide.cli.output import ReaderGoneError, note
    from expertide.errors import ExpertideError
    from expertide.settings import Settings

    # Newer typer carries its own copy of click; the base class of its errors is reached without naming either.
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows a question mark; it must not end the answer.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        # Also for commands that need none of them: a typing error must not pass for a diagnosis.
        Settings.from_env()
        # Newer typer gives an exit code back, also 130 for a KeyboardInterrupt; older ones raise.
        code = app(arguments, prog_name="expertide", standalone_mode=False)
        sys.stdout.flush()
        return _ended(code if isinstance(code, int) else DONE)
    except typer.Exit as stop:
        return _ended(int(stop.exit_code))
    except usage_error as error:
        return _usage(error)
    except ExpertideError as error:
        note(f"expertide: {_short(str(error))}")
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except (ReaderGoneError, BrokenPipeError):
        _forget_output()
        return DONE
    except MemoryError:
        note("expertide: out of memory; lower --ram, --context or --prefill-chunk")
        return FAILED
    except Exception as error:
        # Text of the parser itself, such as --help, does not go through `emit`.
        if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
            _forget_output()
            note(f"expertide: standard output: cannot be written: {error.strerror}")
            return FAILED
        return _unexpected(error)


def _to_nowhere(descriptor: int) -> TextIO:
    """A stream in the place of one that was closed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere < descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
        nowhere = descriptor
    return os.fdopen(nowhere, "w", encoding="utf-8")


def _forget_output() -> None:
    """What standard output did not take is dropped: Python would complain once more when it flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _ended(code: int) -> int:
    return _interrupted() if code == INTERRUPTED else code


def _interrupted() -> int:
    print("expertide: interrupted", file=sys.stderr)
    return INTERRUPTED


def _usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "expertide"
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    print(
        f"{command}: {_short(text.removeprefix('Invalid value: '), max_lines=2)}\ntry `{command} --help`",
        file=sys.stderr,
    )
    return USAGE


def _unexpected(error: Exception) -> int:
    """A bug of ours: still no traceback in people's faces, but a place to find one."""
    from expertide.settings import Settings

    if Settings.from_env().traceback:
        raise error
    print(f"expertide: internal error: {type(error).__name__}: {_short(str(error))}", file=sys.stderr)
    print("please report it; EXPERTIDE_TRACEBACK=1 shows where it happened", file=sys.stderr)
    return FAILED


def _short(text: str, max_lines: int = 3) -> str:
    """At most `max_lines` lines and 2,000 characters: file names and metadata inside a message can be anything."""
    from expertide.cli.output import one_line

    lines = [one_line(line) for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:max_lines])[:2000] or "failed"
