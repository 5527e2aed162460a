"""`expertide chat MODEL`: a conversation. What earlier turns left in the KV cache is kept where the bits allow it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from expertide.cli.flags import ModelName, with_flags
from expertide.cli.output import ProgressBars, emit, note
from expertide.cli.reports import load_line, stats_line
from expertide.cli.run import INTERRUPTED, show
from expertide.engine.sampling import SamplingParams
from expertide.errors import RequestError, StorageError
from expertide.llm import LLM
from expertide.options import Options

HELP = "/reset begins anew, /stats shows the last answer's figures, /exit or Ctrl-D ends; Ctrl-C stops an answer"


@with_flags
def command(
    model: ModelName,
    options: Options,
    params: SamplingParams,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="A system message.")] = None,
) -> None:
    """Talk with a model, turn by turn."""
    with ProgressBars() as progress, LLM.from_options(model, options, progress) as llm:
        if not llm.tokenizer.has_chat_template:
            raise RequestError(f"{llm.prepared.name}: has no chat template; use `expertide run --raw`")
        for warning in llm.warnings:
            note(f"note: {warning}")
        note(load_line(llm))
        note(HELP)
        talk(llm, params, [] if system is None else [{"role": "system", "content": system}], progress)


def talk(llm: LLM, params: SamplingParams, opening: list[dict[str, str]], progress: ProgressBars) -> None:
    """The loop: read a line, answer it, until the input ends."""
    messages, stats = list(opening), ""
    while (line := _read_line()) is not None:
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            messages = list(opening)
        elif line == "/stats":
            note(stats or "no answer yet")
        elif line == "/help":
            note(HELP)
        elif line.strip():
            turn = [*messages, {"role": "user", "content": line}]
            answer, stats = _answer(llm, params, turn, progress) or (None, stats)
            # A turn that failed leaves no trace: the next one is answered as if it had not been said.
            if answer is not None:
                messages = [*turn, {"role": "assistant", "content": answer}]


def _answer(
    llm: LLM, params: SamplingParams, messages: list[dict[str, str]], progress: ProgressBars
) -> tuple[str, str] | None:
    """(text, statistics line), or None when this turn failed."""
    try:
        with llm.interrupt:
            llm.interrupt.clear()
            stream = llm.stream_chat(messages, params, keep_prefix=True)
            show(stream, is_silent=False, progress=progress)
    except (RequestError, StorageError) as error:
        note(f"expertide: {error}")
        return None
    output = stream.output
    if output.finish_reason == "length":
        note("(cut: the limit of -n or of the context was reached)")
    elif output.finish_reason == "abort":
        note("(stopped)")
    return output.text, stats_line(output.stats)


def _read_line() -> str | None:
    """The next line; None at the end of the input. Ctrl-C here ends the program."""
    if sys.stdin is None:  # closed by the caller
        return None
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        if is_terminal:
            return input("> ")
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None
    except EOFError:
        emit("\n")
        return None
    except UnicodeDecodeError:
        raise RequestError("standard input is not UTF-8 text") from None
    except KeyboardInterrupt:
        emit("\n")
        raise typer.Exit(INTERRUPTED) from None
