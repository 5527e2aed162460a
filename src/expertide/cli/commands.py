"""The commands and where they are: one module each. Importing this imports them all, but no torch."""

from __future__ import annotations

from typing import Annotated

import typer

from expertide import __version__
from expertide.cli import bench, chat, doctor, evaluate, inspect, models, plan, pull, run, serve, trace

app = typer.Typer(
    name="expertide",
    help="Runs Mixture-of-Experts language models that are larger than the memory they run in.",
    epilog="MODEL is a .gguf file (any part of a split set), a pulled ORG/NAME, or `demo`, the small model inside.",
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
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(0)


app.command("run")(run.command)
app.command("chat")(chat.command)
app.command("serve")(serve.command)
app.command("pull")(pull.command)
app.command("list")(models.command)
app.command("inspect")(inspect.command)
app.command("plan")(plan.command)
app.command("doctor")(doctor.command)
app.command("bench")(bench.command)
app.command("eval")(evaluate.command)
app.add_typer(trace.app, name="trace")
