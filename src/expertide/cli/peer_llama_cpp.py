"""One process of a comparison, the peer's side: run by a Python that has llama-cpp-python, and imports nothing of ours.

Same protocol as `bench_worker.py`: job on stdin, result on stdout. Greedy, from token ids; the model file is mapped,
or read into anonymous memory when the job says so.
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
import time
from typing import Any


def main() -> int:
    job = json.load(sys.stdin)
    try:
        import llama_cpp
    except ImportError as error:
        print(f"{sys.executable} has no llama-cpp-python: {error}", file=sys.stderr)
        return 1
    begin = time.perf_counter()
    llm = llama_cpp.Llama(
        job["model"],
        n_ctx=job["context"],
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        n_batch=job["peer_batch"],
        n_ubatch=job["peer_batch"],
        use_mmap=job["peer_mmap"],
        n_gpu_layers=0,
        logits_all=False,
        verbose=False,
    )
    load_s = time.perf_counter() - begin
    result = {
        "engine": "llama.cpp",
        "version": f"llama-cpp-python {llama_cpp.__version__}",
        "system_info": llama_cpp.llama_print_system_info().decode(errors="replace"),
        "load_s": load_s,
        "runs": [answer(llama_cpp, llm, run, job["peer_batch"]) for run in job["runs"]],
    }
    result["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    json.dump(result, sys.stdout)
    return 0


def answer(api: Any, llm: Any, run: dict[str, Any], batch: int) -> dict[str, Any]:
    """Prefill and greedy decode of one prompt from an empty cache, by the C interface: no Python per logit."""
    context, ids = llm.ctx, run["ids"]
    api.llama_memory_clear(api.llama_get_memory(context), True)
    begin = time.perf_counter()
    for start in range(0, len(ids), batch):
        feed(api, context, ids[start : start + batch])
    tokens = [best(api, llm)]
    ttft = time.perf_counter()
    while len(tokens) < run["num_tokens"]:
        feed(api, context, tokens[-1:])
        tokens.append(best(api, llm))
    return {
        "kind": run["kind"],
        "prompt_tokens": len(ids),
        "prefill_s": ttft - begin,
        "ttft_s": ttft - begin,
        "decode_tokens": len(tokens) - 1,
        "decode_s": time.perf_counter() - ttft,
        "token_ids": tokens,
    }


def feed(api: Any, context: Any, ids: list[int]) -> None:
    array = (api.llama_token * len(ids))(*ids)
    code = api.llama_decode(context, api.llama_batch_get_one(array, len(ids)))
    if code != 0:
        raise SystemExit(f"llama_decode gave {code}")


def best(api: Any, llm: Any) -> int:
    """The likeliest token after the last one that was fed; waits for the computation."""
    import numpy as np

    logits = api.llama_get_logits_ith(llm.ctx, -1)
    count = llm.n_vocab()
    address = ctypes.addressof(logits.contents)
    return int(np.ctypeslib.as_array((ctypes.c_float * count).from_address(address)).argmax())


if __name__ == "__main__":
    sys.exit(main())
