"""The program `expertide`: finds the command, runs it, and turns what goes wrong into a line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from expertide import __version__
from expertide.cli import bench, chat, doctor, evaluate, inspect, plan, run, trace
from expertide.cli.output import ReaderGoneError, note
from expertide.errors import ExpertideError
from expertide.settings import Settings

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
# Newer typer carries its own copy of click; the base class of its errors is reached without naming either.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="expertide",
    help="Runs Mixture-of-Experts language models that are larger than the memory they run in.",
    epilog="MODEL is a .gguf file (any part of a split set), or `demo` for the small model inside the package.",
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Runs Mixture-of-Experts language models that are larger than the memory they run in."""
    if version:
        print(f"expertide {__version__}")
        raise typer.Exit(DONE)
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(DONE)


app.command("run")(run.command)
app.command("chat")(chat.command)
app.command("inspect")(inspect.command)
app.command("plan")(plan.command)
app.command("doctor")(doctor.command)
app.command("bench")(bench.command)
app.command("eval")(evaluate.command)
app.add_typer(trace.app, name="trace")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; always ends in SystemExit."""
    sys.exit(run_command(sys.argv[1:] if arguments is None else list(arguments)))


def run_command(arguments: list[str]) -> int:
    """Run one command line; the exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows a question mark; it must not end the answer.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = app(arguments, prog_name="expertide", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except typer.Exit as stop:
        return int(stop.exit_code)
    except _UsageError as error:
        return _usage(error, arguments)
    except ExpertideError as error:
        note(f"expertide: {_short(str(error))}")
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        note("expertide: interrupted")
        return INTERRUPTED
    except (ReaderGoneError, BrokenPipeError):
        # Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except MemoryError:
        note("expertide: out of memory; lower --ram, --context or --prefill-chunk")
        return FAILED
    except Exception as error:
        return _unexpected(error)


def _usage(error: Exception, arguments: list[str]) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "expertide"
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    note(f"{command}: {_short(text.removeprefix('Invalid value: '))}\ntry `{command} --help`")
    return USAGE


def _unexpected(error: Exception) -> int:
    """A bug of ours: still no traceback in people's faces, but a place to find one."""
    if Settings.from_env().traceback:
        raise error
    note(f"expertide: internal error: {type(error).__name__}: {_short(str(error))}")
    note("please report it; EXPERTIDE_TRACEBACK=1 shows where it happened")
    return FAILED


def _short(text: str) -> str:
    """At most two lines and 2,000 characters: file names and metadata inside a message can be anything."""
    lines = [
        "".join(char if char.isprintable() else "?" for char in line) for line in text.splitlines() if line.strip()
    ]
    return "\n".join(lines[:2])[:2000] or "failed"
