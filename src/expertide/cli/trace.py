"""`expertide trace diff A B`: where two runs under EXPERTIDE_DUMP first part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from expertide.cli.output import emit
from expertide.models.trace import first_difference

app = typer.Typer(
    help="Lay two traces side by side (made with EXPERTIDE_DUMP=DIR).",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root() -> None:
    """Lay two traces side by side (made with EXPERTIDE_DUMP=DIR)."""


@app.command("diff")
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A folder that EXPERTIDE_DUMP wrote.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one, of the same prompt.")],
    tolerance: Annotated[
        float,
        typer.Option(help="0: any bit counts; above: numbers may differ by this share.", min=0.0, max=1.0),
    ] = 0.0,
) -> None:
    """Name the first op whose results differ. Exit 1 when there is one."""
    difference = first_difference(a, b, tolerance=tolerance)
    if difference is None:
        emit("no difference\n")
        return
    emit(f"line {difference.line:,}: {difference.what}\n")
    raise typer.Exit(1)
