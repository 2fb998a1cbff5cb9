"""Writes a tokenizer.json for a model that has none. Run by the front as a process of its own, so that the front never loads transformers.

python -m forerun.engine.convert_tokenizer MODEL_FOLDER_OR_GGUF OUTPUT_FOLDER [--trust-remote-code]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main(argv: list[str]) -> int:
    from transformers import AutoTokenizer

    source, target = Path(argv[0]), Path(argv[1])
    more: dict[str, Any] = {"trust_remote_code": "--trust-remote-code" in argv[2:], "local_files_only": True}
    packed = [source] if source.is_file() else sorted(source.glob("*.gguf"))
    if packed and not (source / "config.json").is_file():
        source, more["gguf_file"] = packed[0].parent, packed[0].name
    tokenizer = AutoTokenizer.from_pretrained(source, **more)
    if not tokenizer.is_fast:
        print(f"{type(tokenizer).__name__} has no fast form", file=sys.stderr)
        return 1
    tokenizer.save_pretrained(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
