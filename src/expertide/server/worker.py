"""The engine process: `python -m expertide.server.worker FD`, started by the HTTP process, a socket its only door.

    receiving thread    messages; Submit and Call are answered here, also while a prompt is computed
    main thread         loads the model, then steps

It ends when the HTTP process says so or is gone. Signals are the HTTP process's affair: a Ctrl-C in a terminal, and a
service manager's SIGTERM, reach both.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import Any

from expertide.errors import ExpertideError
from expertide.llm import LLM
from expertide.options import Options
from expertide.server.backend import LLMBackend, failure
from expertide.server.messages import (
    Answer,
    Call,
    Cancel,
    Channel,
    Close,
    Failed,
    Load,
    Progress,
    Ready,
    Refused,
    Submit,
)
from expertide.settings import Settings

# A step that is under way when the other process goes ends at its next layer; a disk that hangs may never.
_END_S = 5.0


def main(arguments: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(arguments[0])))
    job = channel.receive()
    if not isinstance(job, Load):
        return 1
    try:
        return _serve(channel, job)
    except OSError:
        # The socket: whoever would read the answer is gone.
        return 1


def _serve(channel: Channel, job: Load) -> int:
    worker = Worker(channel)
    try:
        llm = LLM.from_options(
            job.model, Options(**job.options), progress=worker.on_progress, server_bytes=job.server_bytes
        )
    except ExpertideError as error:
        channel.send(Refused(str(error)))
        return 1
    except MemoryError:
        channel.send(Refused("out of memory; lower --ram, --context or --prefill-chunk"))
        return 1
    except OSError:
        raise
    except Exception as error:
        if Settings.from_env().traceback:
            traceback.print_exc()
        channel.send(Refused(f"internal error: {type(error).__name__}: {error}"))
        return 1
    with llm:
        backend = LLMBackend(llm, lambda id_, done, total: channel.send(Progress("prefill", done, total, id_)))
        worker.run(backend)
    return 0


class Worker:
    """Carries messages between the channel and a backend."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._backend: LLMBackend | None = None
        # Something to do, or the end.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_over = False

    def on_progress(self, what: str, done: int, total: int) -> None:
        """Passed to the `LLM`."""
        if what == "prefill":
            if self._backend is not None:
                self._backend.prefill_progress(done, total)
        else:
            self._channel.send(Progress(what, done, total))

    def run(self, backend: LLMBackend) -> None:
        """Step until the other process says Close or is gone."""
        self._backend = backend
        self._channel.send(Ready(backend.facts()))
        threading.Thread(target=self._receive, name="messages", daemon=True).start()
        while not self._is_over:
            if backend.has_work:
                step = backend.step()
                for failed in step.failed:
                    if failed.kind == "internal":
                        print(f"expertide: {failed.message}", file=sys.stderr, flush=True)
                self._channel.send(step)
            else:
                self._wake.get()
        backend.close()

    def _receive(self) -> None:
        backend = self._backend
        assert backend is not None
        while (message := self._channel.receive()) is not None and not isinstance(message, Close):
            if isinstance(message, Submit):
                self._reply(message.id, lambda m=message: backend.submit(m))
                self._wake.put(None)
            elif isinstance(message, Cancel):
                backend.cancel(message.id)
            elif isinstance(message, Call):
                self._reply(message.id, lambda m=message: Answer(m.id, backend.call(m.name, m.arguments)))
        self._is_over = True
        backend.cancel_all()
        self._wake.put(None)
        timer = threading.Timer(_END_S, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def _reply(self, request_id: str, work: Any) -> None:
        try:
            result = work()
        except Exception as error:  # the outermost loop of this thread
            result = failure(request_id, error)
        if isinstance(result, Failed) and result.kind == "internal":
            print(f"expertide: {result.message}", file=sys.stderr, flush=True)
        try:
            self._channel.send(result)
        except OSError:
            # The next `receive` finds it out.
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
