"""Every error that a file, a flag, a disk or a caller can cause.

The class says whose problem it is. The message is complete: subject, what was found, what was expected, and a hint if
something can be done. The command line prints it without a traceback and exits with 1; a server maps it to a status.
"""

from __future__ import annotations


class ExpertideError(Exception):
    """Base of all errors meant for a person; never raised itself."""


class FormatError(ExpertideError):
    """The file is damaged, lies about itself, or is no model file."""


class UnsupportedError(ExpertideError):
    """The input is sound, but this program has no code for it yet."""


class BudgetError(ExpertideError):
    """What must stay in memory does not fit into the budget."""


class StorageError(ExpertideError):
    """The disk did not deliver: missing file, read error, short read."""


class RequestError(ExpertideError):
    """The caller asked for something impossible: a bad flag value, a prompt over the context."""


class ContextLengthError(RequestError):
    """The prompt has more tokens than the context holds.

    Attributes:
        prompt_tokens, context: both counts.
    """

    def __init__(self, message: str, *, prompt_tokens: int, context: int) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.context = context


class NumericsError(ExpertideError):
    """A layer gave values that are not finite; the request ends, nothing is sampled from them."""
