"""`expertide run MODEL`: one prompt, one answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from expertide.cli.flags import JsonFlag, ModelName, with_flags
from expertide.cli.output import JsonTarget, ProgressBars, emit, note
from expertide.cli.reports import load_line, stats_line
from expertide.engine.sampling import SamplingParams
from expertide.errors import RequestError, StorageError
from expertide.llm import LLM, Stream
from expertide.options import Options

INTERRUPTED = 130
# No context holds a prompt of 256 MiB; reading on would only fill memory.
_MAX_PROMPT_BYTES = 256 << 20


@with_flags
def command(
    model: ModelName,
    options: Options,
    params: SamplingParams,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt.")] = None,
    prompt_file: Annotated[
        str | None, typer.Option("--prompt-file", metavar="FILE", help="Read the prompt from a file.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the model's chat template.")
    ] = False,
    json: JsonFlag = None,
) -> None:
    """Answer one prompt: from -p, --prompt-file or standard input."""
    target = JsonTarget(json)
    text = read_prompt(prompt, prompt_file)
    with ProgressBars() as progress, LLM.from_options(model, options, progress) as llm:
        for warning in llm.warnings:
            note(f"note: {warning}")
        note(load_line(llm))
        with llm.interrupt:
            llm.interrupt.clear()
            stream = llm.stream(prompt_ids(llm, text, raw=raw), params)
            show(stream, is_silent=target.is_stdout, progress=progress)
            output = stream.output
            was_interrupted = llm.interrupt.hit
        note(stats_line(output.stats))
        if target:
            target.write(output.stats)
    if output.finish_reason == "abort" or was_interrupted:
        raise typer.Exit(INTERRUPTED)


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The prompt's text from the one place that was named.

    Raises:
        typer.BadParameter: no place, or two.
        RequestError: the text is empty, too long or not UTF-8.
        StorageError: the file cannot be read.
    """
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("-p and --prompt-file both give a prompt; use one of them")
    if prompt is not None:
        text = prompt
    elif prompt_file is not None:
        text = _decoded(_read_file(Path(prompt_file)), prompt_file)
    elif sys.stdin is None or sys.stdin.isatty():
        raise typer.BadParameter("no prompt: give -p TEXT, --prompt-file FILE, or text on standard input")
    else:
        text = _decoded(sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1), "standard input")
    if not text:
        raise RequestError("the prompt is empty")
    check_is_text("-p" if prompt_file is None else prompt_file, text)
    return text


def check_is_text(source: str, text: str) -> None:
    """Refuse what came as bytes that are no UTF-8, before a model is loaded for it.

    Raises:
        RequestError: the text holds such a byte.
    """
    for position, char in enumerate(text):
        if "\ud800" <= char <= "\udfff":
            raise RequestError(f"{source}: character {position:,} is not UTF-8 text")


def prompt_ids(llm: LLM, text: str, *, raw: bool) -> list[int]:
    """Token ids of a prompt: one user message of the chat template, or the text itself."""
    if raw:
        return llm.encode(text)
    if not llm.tokenizer.has_chat_template:
        note("note: the model has no chat template; the prompt is continued as it is (as with --raw)")
        return llm.encode(text)
    return llm.chat_prompt_ids([{"role": "user", "content": text}])


def show(stream: Stream, *, is_silent: bool, progress: ProgressBars) -> None:
    """Write the pieces as they come, and a newline at the end."""
    has_text = False
    try:
        for piece in stream:
            progress.close()
            if not is_silent:
                emit(piece)
                has_text = True
    finally:
        stream.close()
        # The error's line, or the statistics, must not stick to the answer.
        if has_text:
            emit("\n")


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from None


def _decoded(data: bytes, source: str) -> str:
    if len(data) > _MAX_PROMPT_BYTES:
        raise RequestError(f"{source}: the prompt is longer than {_MAX_PROMPT_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{source}: byte {error.start:,} is not UTF-8 text") from None
