#!/usr/bin/env python3
"""What Python takes with the libraries of a run and no model: the figures beside `prepare.INTERPRETER_BYTES`.

    python tools/interpreter_size.py

Run it in an environment of each Python and torch that is in question. Linux.
"""

from __future__ import annotations

import platform
import resource

import jinja2
import numpy
import tokenizers
import torch


def main() -> None:
    # One operation: some libraries of torch load only then.
    torch.ones(8, 8) @ torch.ones(8, 8)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    versions = [f"{module.__name__} {module.__version__}" for module in (torch, numpy, tokenizers, jinja2)]
    print(f"Python {platform.python_version()}, {', '.join(versions)}: peak resident set {peak_bytes / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
