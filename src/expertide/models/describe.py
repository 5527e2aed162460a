"""How `inspect` puts the shared parts of a model into words."""

from __future__ import annotations

from expertide.kernels.rope import RopeSpec
from expertide.kernels.router import RouterSpec


def describe_rope(rope: RopeSpec) -> str:
    base = f"base {rope.theta:g}"
    if rope.yarn is None:
        return base
    yarn = rope.yarn
    return (
        f"{base}, YaRN factor {yarn.factor:g} over {yarn.original_context:,} positions "
        f"(beta {yarn.beta_fast:g}/{yarn.beta_slow:g})"
    )


def describe_router(router: RouterSpec) -> str:
    return (
        router.score
        + (" + selection bias" if router.has_bias else "")
        + (f", best {router.top_groups} of {router.num_groups} groups" if router.num_groups > 1 else "")
        + (", weights sum to 1" if router.renormalize else "")
        + (f", scale {router.scale:g}" if router.scale != 1 else "")
    )
