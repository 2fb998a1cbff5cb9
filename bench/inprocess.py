"""Our model loop beside OpenVINO's, in turns and without any server: step time by rows, and prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from forerun.bench.bars import Bar
from forerun.bench.stats import median
from forerun.bench.yardstick import Loop, bare, openvino

KINDS = {"bf16": ("f16", ()), "8 bits": ("q8_0", ("--quantize", "int8")), "4 bits": ("q4_0", ("--quantize", "int4"))}
"""the GGUF file and our flags for each kind of weights; OpenVINO computes in bf16 with all of them"""
ROWS = (1, 8, 16)
PROMPTS = (57, 512)
CONTEXT = 57
STEPS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Indoors:
    """One round of one kind of weights. `decode`: tokens a second by rows; `prompt_ms` by length. Ours and theirs."""

    weights: str
    round: int
    decode: dict[int, tuple[float, float]]
    prompt_ms: dict[int, tuple[float, float]]


def files(peers: Path) -> tuple[Path, dict[str, Path]]:
    """OpenVINO's Python, and the model file for each kind of weights that is there; none where OpenVINO is not."""
    python = peers / "openvino/venv/bin/python"
    found = {weights: peers / "llama.cpp/models" / f"{kind}.gguf" for weights, (kind, _) in KINDS.items()}
    return python, {weights: file for weights, file in found.items() if (peers / "openvino/ready").is_file() and file.is_file()}


async def measure(model_id: str, peers: Path, rounds: int, say: Callable[[str], None], kinds: Sequence[str] = ("bf16",)) -> list[Indoors]:
    """Raises BenchError when a loop ended."""
    python, models = files(peers)
    found = []
    for weights in kinds:
        if weights not in models:
            continue
        say(f"in-process, {weights}: starting")
        async with bare(model_id, KINDS[weights][1]) as ours, openvino(python, models[weights]) as theirs:
            for loop in (ours, theirs):
                await _round(loop)  # the first use of a shape records or compiles it
            for number in range(rounds):
                say(f"in-process, {weights}: round {number + 1} of {rounds}")
                order = (ours, theirs) if number % 2 == 0 else (theirs, ours)
                taken = {loop: await _round(loop) for loop in order}
                (decode, prompt), (other_decode, other_prompt) = taken[ours], taken[theirs]
                paired = {rows: (decode[rows], other_decode[rows]) for rows in ROWS}
                found.append(Indoors(weights, number, paired, {length: (prompt[length], other_prompt[length]) for length in PROMPTS}))
    return found


async def _round(loop: Loop) -> tuple[dict[int, float], dict[int, float]]:
    """Tokens a second by rows, and milliseconds to the first token by length of the prompt."""
    decode = {}
    for rows in ROWS:
        decode[rows] = rows / median(await loop.decode(rows, CONTEXT, STEPS))
    prompts = {}
    for length in PROMPTS:
        taken = [await loop.prefill(length) for _ in range(3)]
        prompts[length] = median(second for seconds in taken for second in seconds) * 1000
    return decode, prompts


def bars(rounds: Sequence[Indoors]) -> list[Bar]:
    """Of the bf16 rounds."""
    chosen = [one for one in rounds if one.weights == "bf16"]
    if not chosen:
        return []

    def middle(pairs: list[tuple[float, float]], unit: str) -> tuple[float, str]:
        note = f"{median(ours for ours, _ in pairs):.0f}, OpenVINO {median(theirs for _, theirs in pairs):.0f} {unit}"
        return median(ours / theirs for ours, theirs in pairs), note

    batch, batch_note = middle([one.decode[16] for one in chosen], "tok/s")
    rates = [(512 / one.prompt_ms[512][0] * 1000, 512 / one.prompt_ms[512][1] * 1000) for one in chosen]
    prefill, prefill_note = middle(rates, "tok/s")
    return [
        Bar("in-process, 16 rows: ours / OpenVINO", batch, "≥", 1.0, "", batch_note),
        Bar("in-process, prompt of 512: ours / OpenVINO", prefill, "≥", 0.95, "", prefill_note),
        Bar("in-process, first token of 57", median(one.prompt_ms[57][0] for one in chosen), "≤", 25, "ms"),
    ]


def table(rounds: Sequence[Indoors]) -> str:
    """Medians; ours, then theirs."""
    if not rounds:
        return ""
    lines = [
        "in-process (ours / OpenVINO)"
        + "".join(f"{f'{rows} rows tok/s':>18}" for rows in ROWS)
        + "".join(f"{f'{n} tok. ms':>16}" for n in PROMPTS)
    ]
    for weights in dict.fromkeys(one.weights for one in rounds):
        chosen = [one for one in rounds if one.weights == weights]

        def cell(pairs: list[tuple[float, float]]) -> str:
            return f"{median(ours for ours, _ in pairs):.0f} / {median(theirs for _, theirs in pairs):.0f}"

        rates = "".join(f"{cell([one.decode[rows] for one in chosen]):>18}" for rows in ROWS)
        lines.append(f"{weights:<28}{rates}" + "".join(f"{cell([one.prompt_ms[length] for one in chosen]):>16}" for length in PROMPTS))
    return "\n".join(lines)
