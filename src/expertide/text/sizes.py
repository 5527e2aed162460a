"""What a tokenizer costs in memory, for the plan: known before anything is built, from two counts.

Measured with tokenizers 0.23 on x86-64 Linux: growth of the resident set in a process that has everything imported,
from opening the file to the finished tokenizer, decoded metadata included:

    vocabulary                            tokens     merges    measured
    demo                                   4,096      3,837     8.0 MiB
    DeepSeek-V2's size, hardly a merge   102,400          5    30.7 MiB
    DeepSeek-V2                          102,400     99,757    55.0 MiB

`make check-large` measures the second one again. Encoding keeps a cache of recent pieces besides: 4 MiB after 16,000
tokens of text.
"""

from __future__ import annotations

_BASE_BYTES = 6_400_000  # jinja2, the chat template, the pipeline itself
_BYTES_PER_TOKEN = 252  # strings of the metadata, and the way from text to id and back
_BYTES_PER_MERGE = 256


def tokenizer_bytes(num_tokens: int, num_merges: int) -> int:
    """Resident bytes that a byte-level BPE tokenizer adds; without the imported packages."""
    return _BASE_BYTES + num_tokens * _BYTES_PER_TOKEN + num_merges * _BYTES_PER_MERGE
