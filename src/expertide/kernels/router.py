"""How a layer chooses experts: one set of explicit parameters for every router in the field.

    scores   softmax over all experts, or sigmoid of each logit; float32
    choice   scores + bias (the bias chooses only; weights never see it)
    groups   E experts in `num_groups` equal blocks; only the best `top_groups` blocks may be chosen from
    weights  the chosen scores; divided by (their sum + 1e-20) if `renormalize`; then times `scale`

Equal scores: the lower expert id wins. Combinations that no known model uses are refused here, by name, because nobody
could say what they mean. No torch: the planner and the config readers use this too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expertide.errors import UnsupportedError

RENORMALIZE_EPS = 1e-20  # DeepSeek-V2 and V3 modelling code

Score = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2_sum"]


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Parameters of one router.

    Attributes:
        num_experts: E.
        num_experts_per_tok: K, 1 <= K <= E.
        score: what the logits become.
        has_bias: a float32 [E] correction is added to the scores for the choice.
        num_groups, top_groups: 1 and 1 when the choice is not limited to groups.
        group_score: how a group is rated: its best choice value, or the sum of its two best.
        renormalize: make each token's K weights sum to 1.
        scale: factor on the weights after that.

    Raises:
        UnsupportedError: a value or a combination that no model here is known to use.
    """

    num_experts: int
    num_experts_per_tok: int
    score: Score = "softmax"
    has_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"
    renormalize: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        experts, per_tok = self.num_experts, self.num_experts_per_tok
        if self.score not in ("softmax", "sigmoid"):
            raise UnsupportedError(f"router score {self.score!r} is not known; known: softmax, sigmoid")
        if self.group_score not in ("max", "top2_sum"):
            raise UnsupportedError(f"router group score {self.group_score!r} is not known; known: max, top2_sum")
        if not 1 <= per_tok <= experts:
            raise UnsupportedError(f"router: {per_tok} experts per token of {experts} experts; expected 1 to {experts}")
        if not 1 <= self.top_groups <= self.num_groups:
            raise UnsupportedError(
                f"router: {self.top_groups} groups kept of {self.num_groups}; expected 1 to {self.num_groups}"
            )
        if experts % self.num_groups:
            raise UnsupportedError(f"router: {experts} experts do not divide into {self.num_groups} groups")
        group_size = experts // self.num_groups
        if per_tok > group_size * self.top_groups:
            raise UnsupportedError(
                f"router: {per_tok} experts per token, but {self.top_groups} groups of {group_size} hold only "
                f"{group_size * self.top_groups}"
            )
        if self.num_groups > 1 and self.group_score == "top2_sum" and group_size < 2:
            raise UnsupportedError("router: groups of one expert cannot be rated by their two best")
        if self.has_bias and self.score == "softmax":
            raise UnsupportedError("router: a selection bias together with softmax scores is not known from any model")
        if not self.scale > 0 or self.scale == float("inf"):
            raise UnsupportedError(f"router: weight scale {self.scale} is not a positive number")
