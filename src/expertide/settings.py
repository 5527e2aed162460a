"""Environment variables, all of them; all but one for diagnosis only. Nobody needs one to run a model.

    EXPERTIDE_KERNELS     "native" (default) or "reference": run every op on its torch reference
    EXPERTIDE_CPU_ISA     "auto" (default), "avx512", "avx2", "neon", "base": instruction set of the native kernels
    EXPERTIDE_ACTIVATION_BITS
                          "16" (default) or "8": rounding of activations before they meet packed weights. With 16 the
                          native kernels choose the reference's tokens; 8 is half of the arithmetic
    EXPERTIDE_PIN         1: each compute thread but the first stays on a core of its own
    EXPERTIDE_SERIAL_IO   1: one read at a time, each awaited before anything is computed
    EXPERTIDE_POISON      1: fill an expert's slot with 0xFF when it is freed
    EXPERTIDE_DUMP        folder: write a checksum per layer and op, for `expertide trace diff`
    EXPERTIDE_PEER_PYTHON the Python that has llama-cpp-python, for `expertide bench --against llama.cpp`
    EXPERTIDE_TRACEBACK   1: show where an internal error happened (errors of files and flags never have a traceback)
    EXPERTIDE_API_KEY     the key that `expertide serve` asks of its clients, out of sight of `ps`
    XDG_CACHE_HOME        folder that holds `expertide/` with what was measured and learnt here; by default ~/.cache

A value that cannot be read stops the program, and so does a name that begins with EXPERTIDE_ and is not one of these.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from expertide.errors import RequestError


@dataclass(frozen=True, slots=True)
class Settings:
    """The diagnosis variables, read once."""

    kernels: str = "native"
    cpu_isa: str = "auto"
    activation_bits: int = 16
    pin: bool = False
    serial_io: bool = False
    poison: bool = False
    dump: Path | None = None
    traceback: bool = False
    peer_python: str | None = None
    # Not to be seen in a log by accident.
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Read the variables.

        Raises:
            RequestError: a variable holds something that cannot be read, or is not known.
        """
        env = os.environ if env is None else env
        known = ["EXPERTIDE_" + entry.name.upper() for entry in fields(cls)]
        for name in sorted(env):
            if name.startswith("EXPERTIDE_") and name not in known:
                # A typing error would otherwise show as a diagnosis of the wrong thing.
                raise RequestError(f"{name}: no such environment variable; known: {', '.join(known)}")
        dump = env.get("EXPERTIDE_DUMP", "")
        return cls(
            kernels=_choice(env, "EXPERTIDE_KERNELS", ("native", "reference")),
            cpu_isa=_choice(env, "EXPERTIDE_CPU_ISA", ("auto", "avx512", "avx2", "neon", "base")),
            activation_bits=int(_choice(env, "EXPERTIDE_ACTIVATION_BITS", ("16", "8"))),
            pin=_switch(env, "EXPERTIDE_PIN"),
            serial_io=_switch(env, "EXPERTIDE_SERIAL_IO"),
            poison=_switch(env, "EXPERTIDE_POISON"),
            dump=Path(dump) if dump else None,
            traceback=_switch(env, "EXPERTIDE_TRACEBACK"),
            peer_python=env.get("EXPERTIDE_PEER_PYTHON", "") or None,
            api_key=env.get("EXPERTIDE_API_KEY", "") or None,
        )


def user_cache(env: Mapping[str, str] | None = None) -> Path:
    """Where small files that speed up later runs are kept; nothing there is needed, all of it may be deleted."""
    env = os.environ if env is None else env
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "expertide"


def _choice(env: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    value = env.get(name, "") or known[0]
    if value not in known:
        raise RequestError(f"{name}={value}: known values are {', '.join(known)}")
    return value


def _switch(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "") or "0"
    if value not in ("0", "1"):
        raise RequestError(f"{name}={value}: write 0 or 1")
    return value == "1"
