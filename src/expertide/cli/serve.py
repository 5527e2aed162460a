"""`expertide serve MODEL`: an OpenAI-style HTTP server; docs/server.md."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

import typer

from expertide.cli.flags import ModelName, with_flags
from expertide.cli.output import ProgressBars
from expertide.options import Options
from expertide.settings import Settings


@with_flags
def command(
    model: ModelName,
    options: Options,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; 0.0.0.0 is every one.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", metavar="KEY", help="Ask clients for this key; EXPERTIDE_API_KEY keeps it out of `ps`."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="ID", help="The model's id for clients; by default its file's name.")
    ] = None,
    max_queue: Annotated[
        int,
        typer.Option("--max-queue", metavar="N", min=1, max=65536, help="Requests answered or waiting, at most."),
    ] = 64,
    drain: Annotated[
        float,
        typer.Option("--drain", metavar="SECONDS", min=0, max=86400, help="Time for running requests after SIGTERM."),
    ] = 30,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option("--cors-origin", metavar="ORIGIN", help="A web origin that may call; may be given again."),
    ] = None,
) -> None:
    """Serve a model over HTTP as OpenAI's clients expect it. Ctrl-C or SIGTERM ends it."""
    key = _api_key(api_key)
    origins = tuple(cors_origin or ())
    for origin in origins:
        if not origin.startswith(("http://", "https://")) or origin.endswith("/"):
            raise typer.BadParameter(f"--cors-origin {origin}: expected scheme and name, as https://chat.example.org")
    # FastAPI and uvicorn take 0.3 s to import: after the usage errors.
    from expertide.server.run import ServeOptions, serve

    with ProgressBars() as progress:
        code = serve(
            model,
            {entry.name: getattr(options, entry.name) for entry in fields(options)},
            ServeOptions(host, port, key, name, max_queue, drain, origins),
            progress,
        )
    raise typer.Exit(code)


def _api_key(given: str | None) -> str | None:
    key = Settings.from_env().api_key if given is None else given
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        raise typer.BadParameter("--api-key: expected visible ASCII characters without spaces")
    return key
