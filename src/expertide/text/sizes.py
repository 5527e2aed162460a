"""What a tokenizer costs in memory, for the plan: known before anything is built, from two counts.

Measured with tokenizers 0.23 on x86-64 Linux: growth of the resident set in a process that has all else imported, from
opening the file to the finished tokenizer, the decoded metadata given back. The peak is without the package itself.

    vocabulary                            tokens     merges    measured    planned    peak of the build
    demo                                   4,096      3,837     8.0 MiB    8.6 MiB       4 MiB
    DeepSeek-V2's size, hardly a merge   102,400          5    25.8 MiB   26.7 MiB      30 MiB
    DeepSeek-V2                          102,400     99,757    37.1 MiB   43.8 MiB      63 MiB
    DeepSeek-V4                          129,280    127,741    55.5 MiB   53.7 MiB      92 MiB

The peak, while the strings exist two or three times, comes before the first weight is read. It takes 0.3 s of processor
time for DeepSeek-V2, and as much again to decode the metadata. `make check-large` measures the second row again.
Encoding keeps a cache of recent pieces besides: 4 MiB after 16,000 tokens of text.
"""

from __future__ import annotations

_BASE_BYTES = 7_500_000  # the tokenizers package, the chat template, the pipeline itself
_BYTES_PER_TOKEN = 200  # the way from text to id and back
# Hash tables double in size, so growth comes in steps: between 119 (DeepSeek-V2) and 200 (DeepSeek-V4) bytes a merge.
_BYTES_PER_MERGE = 180
# llguidance and its tree of the vocabulary's bytes: 32 MiB for DeepSeek-V2's 100,002 tokens, measured the same way.
_GRAMMAR_BASE_BYTES = 9_000_000
_GRAMMAR_BYTES_PER_TOKEN = 250


def grammar_bytes(num_tokens: int) -> int:
    """Resident bytes that answers held to a grammar add to a process, at the first one."""
    return _GRAMMAR_BASE_BYTES + num_tokens * _GRAMMAR_BYTES_PER_TOKEN


def tokenizer_bytes(num_tokens: int, num_merges: int) -> int:
    """Resident bytes that a byte-level BPE tokenizer adds to a process."""
    return _BASE_BYTES + num_tokens * _BYTES_PER_TOKEN + num_merges * _BYTES_PER_MERGE
