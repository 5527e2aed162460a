"""`expertide pull ORG/NAME[:FILE or quant]`: get a model from the hub, so that it can be run by that name."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from expertide.cli.output import ProgressBars, note
from expertide.errors import BudgetError, ExpertideError, FormatError, RequestError
from expertide.hub import names, store
from expertide.hub.download import Hub
from expertide.hub.names import Candidate
from expertide.options import Options
from expertide.prepare import Prepared, prepare
from expertide.units import MIB, format_size

# Metadata of a vocabulary with its merges takes up to some megabytes.
_HEAD_BYTES = (8 * MIB, 64 * MIB)


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="ORG/NAME on the hub, with :FILE or :QUANT.")],
    ram: Annotated[
        str, typer.Option("--ram", metavar="SIZE", help="Choose a quant that fits into this much RAM.")
    ] = "auto",
) -> None:
    """Get a model from the hub; broken downloads go on where they stopped, and every byte is checked."""
    hub_name = names.parse(name)
    if hub_name is None:
        raise typer.BadParameter(f"NAME {name}: expected ORG/NAME, ORG/NAME:FILE or ORG/NAME:QUANT")
    try:
        options = Options(ram=ram)
    except RequestError as error:
        raise typer.BadParameter(str(error)) from None
    hub = Hub(hub_name.repo)
    found = names.select(hub_name, names.candidates(hub.files))
    chosen = found[0] if len(found) == 1 else _choose(hub, found, options)
    with ProgressBars() as progress:
        path = hub.fetch(chosen, progress)
    note(f"{path}: {format_size(chosen.num_bytes)}, checked")
    short = f"{hub_name.repo}:{chosen.quant or chosen.first}"
    note(f"run it with `expertide run {hub_name.repo if len(store.pulled(hub_name.repo)) == 1 else short}`")


def _choose(hub: Hub, found: list[Candidate], options: Options) -> Candidate:
    """The first in the usual order that the plan takes; says why, and why not the others before it.

    Raises:
        RequestError: none does.
    """
    for candidate in names.in_order(found):
        label = f"{candidate.quant or candidate.first} ({format_size(candidate.num_bytes)})"
        try:
            hub.check_space(candidate)
            prepared = planned(hub, candidate, options)
        except ExpertideError as error:
            note(f"not {label}: {str(error).splitlines()[0]}")
            continue
        plan = prepared.plan
        experts = f", {100 * plan.cached_share:.0f} % of the experts in RAM" if plan.num_all_experts else ""
        note(f"taking {label}: fits into {format_size(plan.budget_bytes)}{experts}")
        return candidate
    raise RequestError(f"{hub.repo}: none of its {len(found)} models can be run here; name one to get it all the same")


def planned(hub: Hub, candidate: Candidate, options: Options) -> Prepared:
    """The plan of a model of which only the headers are here.

    Raises:
        ExpertideError: as `prepare`.
    """
    with tempfile.TemporaryDirectory(prefix="expertide-pull-") as folder:
        for head_bytes in _HEAD_BYTES:
            for file in candidate.files:
                path = Path(folder) / file.path.rpartition("/")[2]
                with path.open("wb") as out:
                    out.write(hub.head(file, head_bytes))
                    # A hole where the weights will be: headers are checked against the length.
                    out.truncate(file.size)
            try:
                return prepare(Path(folder) / candidate.first.rpartition("/")[2], options)
            except BudgetError:
                raise
            except FormatError:
                # Perhaps the header goes on; zeros are not read as anything valid.
                if head_bytes == _HEAD_BYTES[-1]:
                    raise
    raise AssertionError("a loop over heads has ended without one")
