"""What fewer bits cost in quality: `python -m forerun.bench.quality --model DIR`.

One model in several forms reads the same texts, token by token as a prompt would be. At each token the form's distribution of the next one
is set against that of the float32 form:

    perplexity   exp of the mean −log p of the token that really comes next
    same token   how often both forms hold the same token for the likeliest
    divergence   mean Σ p·log(p / q) in nats, p the float32 form's: 0 = alike; and the value that one token in a hundred exceeds

Texts are the prompts of `--prompts FOLDER` (NAME.jsonl files, shared evenly), else those of `bench/workloads.py`. All forms are in memory
at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from forerun.backends.base import Backend, Pool
from forerun.backends.registry import open_backend
from forerun.bench import workloads
from forerun.engine.batch import Batch
from forerun.engine.models.load import load_model
from forerun.engine.models.model import Model
from forerun.messages import Start

FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, int8 KV": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
    "int8, int8 KV": {"dtype": "bfloat16", "quantize": "int8", "kv_dtype": "int8"},
    "int4": {"dtype": "bfloat16", "quantize": "int4"},
    "int4, int8 KV": {"dtype": "bfloat16", "quantize": "int4", "kv_dtype": "int8"},
}
"""The first is the yardstick."""


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A form's row of the table. `divergence`, `rare`: nats; `weight_bytes` of the model, `position_bytes` of KV a token."""

    form: str
    perplexity: float
    same: float
    divergence: float
    rare: float
    weight_bytes: int
    position_bytes: int


class Reader:
    """A form of the model, and a pool for one text at a time."""

    def __init__(self, folder: Path, backend: Backend, options: dict[str, Any], tokens: int) -> None:
        self._backend = backend
        self.model: Model = load_model(Start(str(folder), max_total_tokens=0, **options), backend, lambda *progress: None)
        self._pages = -(-tokens // backend.caps.page_tokens)
        self._pool: Pool = backend.pool(self.model.pool, self._pages)

    def read(self, tokens: Sequence[int]) -> Tensor:
        """log p of every token at every place: float32 [len(tokens), V]."""
        count = len(tokens)
        places = list(range(count))
        pages = ints([list(range(self._pages))])
        batch = Batch(
            ints(list(tokens)),
            ints(places),
            ints(places),
            ints([-1] * count),
            ints([0, count]),
            ints([count]),
            ints([0]),
            pages,
            ints(places),
        )
        return torch.log_softmax(self.model.forward(batch, self._pool).logits, 1)


def ints(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def compare(truth: Tensor, other: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """log p of the tokens that come next, whether the likeliest tokens are one, and the divergence: [len(tokens) − 1] each. truth, other:
    log p [len(tokens), V]."""
    p, q, following = truth[:-1], other[:-1], torch.tensor(tokens[1:]).unsqueeze(1)
    return q.gather(1, following).squeeze(1), p.argmax(1) == q.argmax(1), (p.exp() * (p - q)).sum(1)


def measure(folder: Path, texts: Sequence[Sequence[int]], forms: dict[str, dict[str, Any]]) -> list[Line]:
    """texts: token ids, at least two each. The first form is the yardstick."""
    backend = open_backend("cpu", 0)
    longest = max(map(len, texts))
    readers = {name: Reader(folder, backend, options, longest) for name, options in forms.items()}
    found: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {name: [] for name in readers}
    for tokens in texts:
        truth: Tensor | None = None
        for name, reader in readers.items():
            logprobs = reader.read(tokens)
            truth = logprobs if truth is None else truth
            found[name].append(compare(truth, logprobs, tokens))
    return [line(name, reader.model, found[name]) for name, reader in readers.items()]


def line(name: str, model: Model, found: list[tuple[Tensor, Tensor, Tensor]]) -> Line:
    logprobs, same, divergence = (torch.cat(parts).double() for parts in zip(*found))
    perplexity, rare = float((-logprobs.mean()).exp()), float(divergence.quantile(0.99))
    return Line(name, perplexity, float(same.mean()), float(divergence.mean()), rare, model.weight_bytes, model.pool.position_bytes)


def choose_texts(prompts: Path | None, count: int) -> Iterator[str]:
    """Every workload's prompts in turns."""
    kinds = workloads.from_folder(prompts) if prompts else workloads.made()
    turns = itertools.zip_longest(*(kind.prompts for kind in kinds))
    return itertools.islice((text for turn in turns for text in turn if text is not None), count)


def table(lines: Sequence[Line]) -> str:
    rows = [
        "| form | weights | KV a token | perplexity | same token | divergence | one in 100 above |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in lines:
        sizes = f"{row.weight_bytes / 1e6:.0f} MB | {row.position_bytes / 1e3:.1f} kB"
        rows.append(f"| {row.form} | {sizes} | {row.perplexity:.2f} | {row.same:.1%} | {row.divergence:.4f} | {row.rare:.3f} |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"), help="a folder with tokenizer.json")
    parser.add_argument("--prompts", type=Path, help="a folder of NAME.jsonl files")
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of a text")
    parser.add_argument("--forms", choices=list(FORMS)[1:], nargs="+", default=list(FORMS)[1:])
    parser.add_argument("--json", type=Path, help="write the lines here too")
    options = parser.parse_args(argv)
    tokenizer = tokenizers.Tokenizer.from_file(str(options.model / "tokenizer.json"))
    texts = [tokenizer.encode(text).ids[: options.tokens] for text in choose_texts(options.prompts, options.texts)]
    texts = [text for text in texts if len(text) > 1]
    lines = measure(options.model, texts, {name: FORMS[name] for name in ("float32", *options.forms)})
    print(f"{len(texts)} texts, {sum(len(text) - 1 for text in texts)} tokens\n\n{table(lines)}")
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(row) for row in lines], indent=1))


if __name__ == "__main__":
    main()
