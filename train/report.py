"""What came out: report.json for programs, README.md for people. Every figure is measured by the command that the README names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forerun.train.acceptance import LENGTHS

README = """# A draft for {target}

{kind} for `--speculator {speculator}`, {megabytes:.1f} MB, {parameters:,} parameters, made by

```sh
{command}
```

from {tokens:,} tokens that the target wrote itself ({conversations:,} conversations), in {steps:,} steps and {minutes:.0f} minutes of
training on {threads} thread{plural}. Its vocabulary has {vocabulary:,} tokens, which are {covers:.1%} of what the target writes.

Guesses that hold, in a chain, on greedy answers to prompts that were not learnt from: the first, and each further one given those before
it; then the tokens that a verification step brings with chains of {lengths} guesses.

| prompts | answers | 1st | 2nd | 3rd | 4th | {heads} |
|---|---|---|---|---|---|{rules}
{rows}
"""


def save(folder: Path, facts: dict[str, Any], acceptance: dict[str, dict[str, Any]], history: list[dict[str, Any]]) -> str:
    """Writes both files; returns the table of acceptance as text."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    whole = facts | {"bytes": size, "acceptance": acceptance, "history": history}
    (folder / "report.json").write_text(json.dumps(whole, indent=2) + "\n")
    rows = "\n".join(_row(name, measured) for name, measured in acceptance.items())
    text = README.format(
        **facts,
        megabytes=size / 1e6,
        plural="" if facts["threads"] == 1 else "s",
        covers=facts["vocabulary_covers"],
        lengths=", ".join(map(str, LENGTHS)),
        heads=" | ".join(f"{guesses} guesses" for guesses in LENGTHS),
        rules="---|" * len(LENGTHS),
        rows=rows,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    return rows


def _row(name: str, measured: dict[str, Any]) -> str:
    rates = [f"{rate:.2f}" for rate in measured["positions"][:4]]
    cells = [name, str(measured["texts"]), *rates, *["–"] * (4 - len(rates))]
    return f"| {' | '.join([*cells, *(f'{length:.2f}' for length in measured['tokens_a_step'].values())])} |"
