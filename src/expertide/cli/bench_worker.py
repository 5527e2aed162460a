"""One process of a comparison, our side: `python -m expertide.cli.bench_worker`, job on stdin, result on stdout.

The peer's side is another program with the same protocol (`peer_llama_cpp.py`): both get token ids, so that no
tokenizer takes part, and both draw greedily.

    job     {"model", "threads", "context", "chunk", "ram", "runs": [{"kind", "ids", "num_tokens"}, …], …}
    result  {"engine", "version", "load_s", "runs": [{"kind", "prefill_s", "decode_s", …}, …], "peak_bytes", …}
"""

from __future__ import annotations

import json
import sys
from typing import Any

from expertide.engine.sampling import SamplingParams
from expertide.errors import ExpertideError
from expertide.llm import LLM
from expertide.options import Options


def main() -> int:
    job = json.load(sys.stdin)
    try:
        result = measure(job)
    except ExpertideError as error:
        print(error, file=sys.stderr)
        return 1
    json.dump(result, sys.stdout)
    return 0


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Load, answer every run of the job, and report.

    Raises:
        ExpertideError: as `LLM` and `LLM.generate`.
    """
    options = Options(**job["options"])
    with LLM.from_options(job["model"], options) as llm:
        if job["everything_in_ram"]:
            llm.wait_for_fill()
        runs = []
        for run in job["runs"]:
            output = llm.generate(run["ids"], SamplingParams(max_tokens=run["num_tokens"], ignore_eos=True))
            timings = output.stats["timings"]
            runs.append(
                {
                    "kind": run["kind"],
                    "prompt_tokens": timings["prefill_tokens"],
                    "prefill_s": timings["prefill_s"],
                    "ttft_s": timings["ttft_s"],
                    "decode_tokens": timings["decode_tokens"],
                    "decode_s": timings["decode_s"],
                    "token_ids": output.token_ids,
                    "experts": output.stats["experts"],
                }
            )
        return {
            "engine": "expertide",
            "version": output.stats["version"],
            "load_s": llm.load_s,
            "runs": runs,
            "peak_bytes": llm.memory()["ram_peak_bytes"],
            "memory": llm.memory(),
            "placement": llm.placement(),
        }


if __name__ == "__main__":
    sys.exit(main())
