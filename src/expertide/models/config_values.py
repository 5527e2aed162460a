"""Values of a model's configuration, read with their checks: GGUF keys and config.json fields of any architecture.

An error names file, key and what was found. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from expertide.errors import FormatError, UnsupportedError
from expertide.formats.metadata import Metadata
from expertide.formats.tensors import ModelFiles
from expertide.kernels.rope import RopePairs, RopeSpec, YarnSpec, yarn_magnitude
from expertide.kernels.router import RouterSpec


class GgufKeys:
    """Typed reads of `architecture.*` keys, with the range checks that many of them share."""

    def __init__(self, files: ModelFiles, architecture: str) -> None:
        self._files = files
        self._architecture = architecture
        self._metadata = Metadata.of(files)

    @property
    def file(self) -> str:
        return str(self._files.files[0])

    def named(self, key: str) -> str:
        return f"{self.file}: {self._architecture}.{key}"

    def error(self, key: str, found: str) -> FormatError:
        return FormatError(f"{self.named(key)} says {found}")

    def has(self, key: str) -> bool:
        return f"{self._architecture}.{key}" in self._files.metadata

    def count(self, key: str) -> int:
        """A number from 0; 0 when absent."""
        return self._metadata.int(f"{self._architecture}.{key}", default=0)

    def positive(self, key: str) -> int:
        return self._metadata.int(f"{self._architecture}.{key}", minimum=1)

    def uniform(self, key: str, num_layers: int, *, only: tuple[int, ...] | None = None) -> int:
        """A positive number, or one per layer that must be the same for all layers (of `only`)."""
        values = self._metadata.per_layer_int(f"{self._architecture}.{key}", num_layers)
        chosen = {values[layer] for layer in (range(num_layers) if only is None else only)}
        if 0 in chosen:
            raise self.error(key, "0, expected 1 or more")
        if len(chosen) > 1:
            raise UnsupportedError(
                f"{self.named(key)} differs between layers ({sorted(chosen)}); one value is known here"
            )
        return chosen.pop()

    def text(self, key: str, *, default: str) -> str:
        return self._metadata.str(f"{self._architecture}.{key}", default=default)

    def switch(self, key: str, *, default: bool = False) -> bool:
        return self._metadata.bool(f"{self._architecture}.{key}", default=default)

    def number(self, key: str, *, default: float) -> float:
        return self._metadata.float(f"{self._architecture}.{key}", default=default)

    def positive_float(self, key: str, *, default: float | None = None) -> float:
        value = self.non_negative_float(key, default=default)
        if value == 0:
            raise self.error(key, "0, expected more")
        return value

    def non_negative_float(self, key: str, *, default: float | None = None) -> float:
        name = f"{self._architecture}.{key}"
        value = self._metadata.float(name) if default is None else self._metadata.float(name, default=default)
        if value < 0:
            raise self.error(key, f"{value}, expected a number from 0")
        return value


class JsonFields:
    """Typed reads of config.json; null counts as absent."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields

    def positive(self, name: str) -> int:
        value = self._fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise FormatError(f"config.json: {name} is {value!r}, expected a whole number from 1")
        return value

    def count(self, name: str) -> int:
        value = self._fields.get(name) or 0
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise FormatError(f"config.json: {name} is {value!r}, expected a whole number from 0")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        value = self._fields.get(name)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise FormatError(f"config.json: {name} is {value!r}, expected a number")
        return float(value)

    def text(self, name: str, *, default: str) -> str:
        value = self._fields.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise FormatError(f"config.json: {name} is {value!r}, expected text")
        return value


def gguf_num_layers(keys: GgufKeys, files: ModelFiles, *, num_unused: int = 0) -> int:
    """Layers of the model; `num_unused` of the file's last ones (draft layers) do not count.

    Raises:
        FormatError: none, or more than a file of so many tensors can hold.
    """
    num_layers = keys.positive("block_count") - num_unused
    if not 0 < num_layers <= len(files.tensors):
        raise keys.error("block_count", f"{num_layers:,} layers, but the file holds {len(files.tensors):,} tensors")
    return num_layers


def gguf_vocab_size(keys: GgufKeys, files: ModelFiles) -> int:
    """Rows of the embedding; the key, where there is one, must agree."""
    embedding = files.tensors.get("token_embd.weight")
    if embedding is None:
        return keys.positive("vocab_size")  # the missing tensor is reported with the others
    rows = embedding.shape[0]
    if keys.has("vocab_size") and keys.positive("vocab_size") != rows:
        raise keys.error("vocab_size", f"{keys.positive('vocab_size'):,}, but token_embd.weight has {rows:,} rows")
    return rows


def gguf_moe_inner(keys: GgufKeys, files: ModelFiles, moe_layers: tuple[int, ...], num_layers: int) -> int:
    """F: the key, else the width of the first MoE layer's down matrices; 0 without MoE layers."""
    if not moe_layers:
        return 0
    if keys.has("expert_feed_forward_length"):
        return keys.uniform("expert_feed_forward_length", num_layers, only=moe_layers)
    down = files.tensors.get(f"blk.{moe_layers[0]}.ffn_down_exps.weight")
    return down.shape[-1] if down else keys.positive("expert_feed_forward_length")


def gguf_rope_base(keys: GgufKeys) -> float:
    """Base of the rope frequencies."""
    theta = keys.positive_float("rope.freq_base", default=10000.0)
    if theta <= 1:
        raise keys.error("rope.freq_base", f"{theta:g}, expected more than 1")
    return theta


def gguf_yarn(keys: GgufKeys) -> YarnSpec | None:
    """How YaRN stretches the frequencies; None for plain rope. What it does to scores is the architecture's affair.

    Raises:
        FormatError: a key of YaRN is missing.
        UnsupportedError: another kind of scaling, or a factor on scores that no known model has.
    """
    kind = keys.text("rope.scaling.type", default="none")
    if kind == "none":
        factors = () if keys.has("rope.scaling.type") else ("rope.scaling.factor", "rope.scale_linear")
        for key in factors:  # llama.cpp takes a factor without a type for linear scaling
            if keys.non_negative_float(key, default=1.0) not in (0.0, 1.0):
                raise UnsupportedError(f"{keys.named(key)} without YaRN is linear rope scaling; known: none, yarn")
        return None
    if kind != "yarn":
        raise UnsupportedError(f"{keys.named('rope.scaling.type')} is {kind!r}; known: none, yarn")
    if keys.positive_float("rope.scaling.attn_factor", default=1.0) != 1.0:
        raise UnsupportedError(f"{keys.named('rope.scaling.attn_factor')} other than 1 is not known here")
    return YarnSpec(
        factor=keys.positive_float("rope.scaling.factor"),
        original_context=keys.positive("rope.scaling.original_context_length"),
        beta_fast=keys.positive_float("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=keys.positive_float("rope.scaling.yarn_beta_slow", default=1.0),
    )


def hf_rope_section(config: Mapping[str, object]) -> Mapping[str, object]:
    """`rope_parameters` of transformers 5, `rope_scaling` of older files, or nothing."""
    section = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(section, Mapping):
        raise FormatError(f"config.json: rope_scaling is {type(section).__name__}, expected an object")
    return section


def hf_rope(config: Mapping[str, object], rope_dim: int, *, pairs: RopePairs = "adjacent") -> RopeSpec:
    """From `rope_scaling` beside `rope_theta`, or from `rope_parameters` (transformers 5).

    Raises:
        FormatError: a field is missing or of the wrong type.
        UnsupportedError: a kind of scaling that has no code here.
    """
    section = hf_rope_section(config)
    fields = JsonFields(section)
    theta = fields.number("rope_theta", default=JsonFields(config).number("rope_theta", default=10000.0))
    kind = fields.text("rope_type", default=fields.text("type", default="default"))
    if kind == "default":
        return RopeSpec(rope_dim, theta, pairs=pairs)
    if kind != "yarn":
        raise UnsupportedError(f"config.json: rope scaling type {kind!r} is not known here; known: default, yarn")
    if section.get("attention_factor") is not None or section.get("truncate", True) is not True:
        raise UnsupportedError("config.json: attention_factor and truncate of YaRN are not known here")
    yarn = YarnSpec(
        factor=fields.number("factor"),
        original_context=fields.positive("original_max_position_embeddings"),
        beta_fast=fields.number("beta_fast", default=32.0),
        beta_slow=fields.number("beta_slow", default=1.0),
    )
    mscale, mscale_all_dim = fields.number("mscale", default=0.0), fields.number("mscale_all_dim", default=0.0)
    # As transformers: the ratio when both are given, else YaRN's own factor.
    magnitude = yarn_magnitude(yarn.factor, 1.0)
    if mscale and mscale_all_dim:
        magnitude = yarn_magnitude(yarn.factor, mscale) / yarn_magnitude(yarn.factor, mscale_all_dim)
    return RopeSpec(rope_dim, theta, yarn, magnitude, pairs)


def check_numbers(
    source: str, norm_eps: float, rope: RopeSpec, attention_scale: float, router: RouterSpec | None
) -> None:
    """Refuse numbers far outside every model: with them angles overflow, or answers are noise without a word.

    Raises:
        FormatError: names `source` and the number.
    """
    ranges: list[tuple[str, float, float, float]] = [
        ("norm epsilon", norm_eps, 1e-30, 1.0),
        ("rope base", rope.theta, 1.0 + 1e-6, 1e15),
        ("factor on cos and sin", rope.magnitude, 1e-4, 1e4),
        ("attention scale", attention_scale, 1e-6, 1e4),
    ]
    if (yarn := rope.yarn) is not None:
        ranges += [
            ("YaRN factor", yarn.factor, 1.0, 1e6),
            ("YaRN beta_fast", yarn.beta_fast, 1e-6, 1e6),
            ("YaRN beta_slow", yarn.beta_slow, 1e-6, 1e6),
        ]
    if router is not None:
        ranges.append(("scale of expert weights", router.scale, 1e-6, 1e6))
    for name, value, low, high in ranges:
        if not low <= value <= high:
            raise FormatError(f"{source}: {name} {value:g}, expected {low:g} to {high:g}")
