"""What can be asked for when a model is loaded: default, unit and one sentence per field.

Flags, `--help` and the keyword arguments of `LLM` all come from this class. "auto" stays "auto" here; it is resolved
once, into the plan, when the model and the machine are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field
from typing import Any

from expertide.errors import RequestError
from expertide.units import parse_size

DEVICES = ("auto", "cpu", "cuda")
FILLS = ("auto", "even", "off")
PREDICTIONS = ("auto", "off", "last", "average", "router")
CACHE_POLICIES = ("auto", "lfu", "lru", "random", "second-miss")
# Below 16 tokens of context no prompt with a chat template fits; above 2^24 an int32 position times a head overflows.
MAX_CONTEXT = 1 << 24
MAX_THREADS = 1024
MAX_PREFILL_CHUNK = 8192


def option(default: Any, text: str, *, metavar: str | None = None, flags: tuple[str, ...] = ()) -> Any:
    """A dataclass field that is also a command line flag.

    Args:
        text: the sentence of `--help`.
        flags: the flag's spellings; by default `--field-name`.
    """
    return field(default=default, metadata={"help": text, "metavar": metavar, "flags": flags})


def flags_of(entry: Field[Any]) -> tuple[str, ...]:
    """The flag's spellings on the command line."""
    given: tuple[str, ...] = entry.metadata.get("flags", ())
    return given or ("--" + entry.name.replace("_", "-"),)


@dataclass(frozen=True, slots=True)
class Options:
    """How a model is loaded. Sizes are text like `4GiB`, a number of bytes, or "auto".

    Raises:
        RequestError: a value out of its range, or one that cannot take effect.
    """

    ram: str | int = option("auto", "Most RAM the process may take in all, such as 4GiB.", metavar="SIZE")
    vram: str | int = option("auto", "Most GPU memory; GPUs are not supported yet.", metavar="SIZE")
    expert_cache: str | int = option("auto", "Most RAM for routed experts, inside --ram.", metavar="SIZE")
    device: str = option(
        "auto", f"Where to compute: {', '.join(DEVICES)}; GPUs are not supported yet, auto is cpu.", metavar="NAME"
    )
    context: int | None = option(
        None, "Most tokens of prompt and answer; by default the model's, at most 8192.", metavar="N"
    )
    threads: int | None = option(None, "Compute threads; by default the usable physical cores.", metavar="N")
    prefill_chunk: int | None = option(
        None, "Prompt tokens computed at once; by default 512, at most the context.", metavar="N"
    )
    cache_policy: str = option(
        "auto", f"Which expert leaves a full cache: {', '.join(CACHE_POLICIES)}; auto is lfu.", metavar="NAME"
    )
    startup_fill: str = option(
        "auto",
        f"Load experts into free memory before they are asked for: {', '.join(FILLS)} (auto: often used ones first).",
        metavar="NAME",
    )
    prefill_prefetch: bool = option(
        True,
        "In prefill, begin the next layer's reads while this one computes.",
        flags=("--prefill-prefetch/--no-prefill-prefetch",),
    )
    predictive_prefetch: str = option(
        "auto",
        f"In decode, read what the next layer may ask for: {', '.join(PREDICTIONS)} (auto: what `doctor MODEL` found "
        "to win on this machine, else off).",
        metavar="NAME",
    )
    pre_tokenizer: str | None = option(
        None, "Split text by this known rule instead of the one that the file names.", metavar="NAME"
    )

    def __post_init__(self) -> None:
        for name in ("ram", "vram", "expert_cache"):
            size_of(name, getattr(self, name))
        _check_choice("device", self.device, DEVICES)
        _check_choice("cache_policy", self.cache_policy, CACHE_POLICIES)
        _check_choice("startup_fill", self.startup_fill, FILLS)
        _check_choice("predictive_prefetch", self.predictive_prefetch, PREDICTIONS)
        _check_range("context", self.context, 16, MAX_CONTEXT)
        _check_range("threads", self.threads, 1, MAX_THREADS)
        _check_range("prefill_chunk", self.prefill_chunk, 1, MAX_PREFILL_CHUNK)
        # TODO(#4): the GPU path; until then a flag that asks for one must not be taken silently.
        if self.device == "cuda":
            raise RequestError("--device cuda: this version computes on the CPU only; use --device cpu or auto")
        if self.vram != "auto":
            raise RequestError(
                f"--vram {self.vram}: has no effect, this version computes on the CPU only; leave the flag out"
            )

    @property
    def ram_bytes(self) -> int | None:
        """Bytes asked for, or None for "auto"."""
        return size_of("ram", self.ram)

    @property
    def expert_cache_bytes(self) -> int | None:
        """Bytes asked for, or None for "auto"."""
        return size_of("expert_cache", self.expert_cache)


def size_of(name: str, value: str | int) -> int | None:
    """Bytes meant by an option; None for "auto".

    Raises:
        RequestError: no size, or not positive.
    """
    if value == "auto":
        return None
    flag = _flag(name)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RequestError(f"{flag}: got {value!r}, expected a size like 4GiB, a number of bytes, or auto")
    if isinstance(value, int):
        if value <= 0:
            raise RequestError(f"{flag}: got {value}, expected a positive number of bytes")
        return value
    try:
        return parse_size(value)
    except RequestError as error:
        raise RequestError(f"{flag}: {error}") from None


def from_mapping(values: Mapping[str, Any]) -> Options:
    """Options from flags; None means "not given"."""
    return Options(**{name: value for name, value in values.items() if value is not None})


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise RequestError(f"{_flag(name)} {value}: known values are {', '.join(known)}")


def _check_range(name: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{_flag(name)}: got {value!r}, expected a whole number")
    if not low <= value <= high:
        raise RequestError(f"{_flag(name)} {value}: must lie between {low:,} and {high:,}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
