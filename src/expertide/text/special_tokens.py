"""Which tokens are control tokens, and which of them end a generation.

Files name the end in several places, and often only in some of them: the ids of `tokenizer.ggml.*`, the list in
generation_config.json, or nothing but a token with a well-known text. The stop set is the union of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Texts that mean "the turn is over" in every family that has them. `<|EOT|>` is not among them: DeepSeek-V4 has it and
# does not stop on it; where it ends a turn (DeepSeek-Coder), the file names it as its end token.
END_TEXTS = frozenset(
    {
        "<｜end▁of▁sentence｜>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<end_of_turn>",
    }
)

# Control tokens that some files type as normal ones (DeepSeek-Coder-V2); as normal tokens no text would reach them.
FILL_IN_TEXTS = frozenset({"<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"})

FORCED_CONTROL_TEXTS = END_TEXTS | FILL_IN_TEXTS


def stop_ids(
    named_ids: Iterable[int | None], control_ids: Mapping[str, int], generation_eos: Iterable[int] = ()
) -> frozenset[int]:
    """The ids that end a generation.

    Args:
        named_ids: what the tokenizer itself calls end of sequence, of turn, of message; None where it is silent.
        control_ids: text -> id of every control token.
        generation_eos: `eos_token_id` of generation_config.json, as a list. Only control tokens of it count: the file
            may have been left in the folder by another model, and an ordinary word must not end an answer.
    """
    controls = frozenset(control_ids.values())
    named = {token_id for token_id in named_ids if token_id is not None}
    known = {control_ids[text] for text in END_TEXTS if text in control_ids}
    return frozenset(named | known | {token_id for token_id in generation_eos if token_id in controls})
