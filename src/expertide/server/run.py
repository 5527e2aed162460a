"""The HTTP process: socket, signals, the engine's life, exit code.

    bind -> start the engine, listen (503 until it is ready) -> serve -> SIGTERM or Ctrl-C: drain -> end
                                     refused -> its sentence, exit 1      a second one: at once

A port that is taken is found out before a model is loaded for it. Exit codes: 0 after SIGTERM, 130 after Ctrl-C, 1 when
the model was refused, the engine has died, or a signal came before all requests had ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import signal
import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from expertide.errors import ExpertideError, RequestError, StorageError
from expertide.hub import names
from expertide.server.app import Served, make_app, max_body_bytes
from expertide.server.client import EngineClient
from expertide.server.guard import Bodies
from expertide.server.messages import Load
from expertide.server.record import log
from expertide.units import MIB, format_size

# Peak resident set of the HTTP process, x86-64 Linux, Python 3.11: 66 MiB idle (FastAPI, uvicorn and the command line's
# own imports), 68 MiB after 200 requests on 50 connections, 77 MiB after as many 1 MB bodies of token ids as are taken
# at once, 98 MiB after the same of "[[],[],…".
SERVER_BYTES = 100 * MIB
# A request's head that takes longer to arrive is not coming.
HEAD_TIMEOUT_S = 30.0
# What is cut off after the drain still writes its error.
_LAST_WORDS_S = 2.0
INTERRUPTED = 130


class ModelRefusedError(ExpertideError):
    """The engine process did not load the model; the sentence is its own."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `expertide serve` adds to loading a model.

    Attributes:
        name: the id that clients give; None takes it from the file's name.
        max_queue: requests being answered or waiting, at most.
        drain_s: seconds that requests under way get after SIGTERM.
        origins: web origins that may call (CORS); none by default.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    name: str | None = None
    max_queue: int = 64
    drain_s: float = 30.0
    origins: tuple[str, ...] = ()


def model_name(model: str) -> str:
    """What clients call a model: its file's name without the ending, its folder's, or its name on the hub."""
    path = Path(model)
    if names.parse(model) is not None and not path.exists():
        return model
    return path.stem if path.suffix == ".gguf" else path.name or model


def serve(
    model: str, load_options: dict[str, Any], options: ServeOptions, on_progress: Callable[[str, int, int], None]
) -> int:
    """Serve until a signal ends it; the exit code.

    Raises:
        RequestError: the host is not an address of this machine.
        StorageError: the port is taken or not allowed.
        ModelRefusedError: the model was not loaded.
    """
    listener = _bind(options.host, options.port)
    _raise_file_limit()
    load = Load(model, load_options, SERVER_BYTES)
    return asyncio.run(_Serving(listener, load, options, on_progress).run())


class _Serving:
    def __init__(
        self, listener: socket.socket, load: Load, options: ServeOptions, on_progress: Callable[[str, int, int], None]
    ) -> None:
        self._listener = listener
        self._options = options
        self._client = EngineClient(load, on_progress=on_progress)
        name = options.name or model_name(load.model)
        # The context is not known yet; until it is, nothing that needs a body is answered.
        self._served = Served(self._client, name, options.max_queue, Bodies(MIB))
        host = listener.getsockname()[0]
        app = make_app(
            self._served,
            api_key=options.api_key,
            is_loopback=host in ("127.0.0.1", "::1"),
            allowed_origins=frozenset(options.origins),
        )
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                backlog=2048,
                timeout_keep_alive=75,
            )
        )
        self._signal: int | None = None
        self._is_cut = False
        self._was_dead = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        engine = asyncio.create_task(self._client.run())
        ready = asyncio.create_task(self._announce())
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            if self._is_cut:
                self._client.kill()
            await self._client.close()
            await engine
            await ready
        if self._client.state == "refused":
            raise ModelRefusedError(self._client.why)
        return self._exit_code()

    async def _announce(self) -> None:
        client = self._client
        await client.settled.wait()
        if client.state == "refused":
            self._server.should_exit = True
        elif client.state == "ready":
            facts = client.facts
            self._served.bodies.max_bytes = max_body_bytes(facts["context"])
            for warning in facts["warnings"]:
                log(f"note: {warning}")
            planned = facts["memory"]["planned"]
            log(
                f"model {self._served.name}, context {facts['context']:,} tokens, planned "
                f"{format_size(planned['total'])} of --ram {format_size(facts['memory']['ram_budget_bytes'])} "
                f"({format_size(planned['server'])} of it for the server)"
            )
            log(f"listening on {self._url()}")
            await client.ended.wait()
        if client.state == "dead" and self._signal is None:
            log(f"expertide: {client.why}")

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _on_signal(self, number: int) -> None:
        if self._signal is not None:
            self._cut("at once")
            return
        self._signal = number
        self._was_dead = self._client.state == "dead"
        self._client.refuse_new()
        if self._client.state != "ready":
            # Nothing is under way; a load need not be finished.
            self._client.kill()
        elif self._client.num_open:
            log(
                f"expertide: {self._client.num_open} requests under way, ending when they have, after "
                f"{self._options.drain_s:g} s at the latest (again: at once)"
            )
        self._server.should_exit = True
        task = asyncio.create_task(self._drain())
        self._tasks.add(task)

    async def _drain(self) -> None:
        await asyncio.sleep(self._options.drain_s)
        self._cut(f"after {self._options.drain_s:g} s")
        await asyncio.sleep(_LAST_WORDS_S)
        self._server.force_exit = True

    def _cut(self, when: str) -> None:
        self._is_cut = self._is_cut or self._client.num_open > 0
        self._client.fail_all("closing", f"the server was shut down {when}")
        if when == "at once":
            self._is_cut = True
            self._client.kill()
            self._server.force_exit = True

    def _exit_code(self) -> int:
        if self._signal == signal.SIGINT:
            return INTERRUPTED
        return 1 if self._is_cut or self._signal is None or self._was_dead else 0


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # Signals are `_Serving`'s.
        yield


class _Protocol(H11Protocol):
    """HTTP/1.1 that does not wait for ever for the head of a request."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def _watch(self) -> None:
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)
        elif not is_waiting and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise RequestError(f"--host {host}: {getattr(error, 'strerror', error)}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        hint = " (another program listens there; choose one with --port)" if error.errno == errno.EADDRINUSE else ""
        raise StorageError(f"cannot listen on {host}, port {port}: {error.strerror}{hint}") from None
    listener.setblocking(False)
    return listener


def _raise_file_limit() -> None:
    """A thousand slow clients are a thousand open files; the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
