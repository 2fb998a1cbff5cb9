"""A small Llama as a draft: `forerun serve --speculator model=DIR`.

It learns the target's distribution at every place of the text: with p the target's probabilities of its likeliest tokens and q the
draft's, the loss is −Σ p log q (the part of Kullback and Leibler's divergence that q can change) plus HARD times −log q of the
likeliest one, because a guess is one token.

Embedding and output head are one matrix over a part of the target's vocabulary; it starts as the principal
components of the target's own embedding, so that tokens that are alike to the target are so to the draft from the first step.
Sequence-level distillation: Kim, Rush 1606.07947; of drafts: DistillSpec, Zhou et al. 2310.08461.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from forerun.engine.weights import open_checkpoint
from forerun.train.kinds.flat import HARD
from forerun.train.kinds.registry import Setting
from forerun.train.shards import Record
from forerun.train.vocabulary import Vocabulary, choose, write_tokenizer

ROW = 1024
"""tokens of a row of a batch: texts stand one behind the other, so that the draft learns to find its own among others"""
HEAD_DIM = 64


class ModelDraft:
    """`vocabulary`: the tokens it knows."""

    def __init__(self, source: Path, net: nn.Module, vocabulary: Vocabulary) -> None:
        self.net: Any = net
        self._source = source
        self._vocabulary = vocabulary
        self._to_draft = torch.from_numpy(vocabulary.to_draft())
        self._guessed = torch.from_numpy(np.isin(np.arange(vocabulary.vocab), vocabulary.kept))
        self._guessed &= self._to_draft != vocabulary.unknown
        parameters = sum(parameter.numel() for parameter in net.parameters())
        self.facts = {"speculator": "model", "parameters": parameters, "vocabulary": vocabulary.size}
        self.facts |= {"vocabulary_covers": round(vocabulary.covered, 4)}

    @staticmethod
    def options(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("the draft model")
        group.add_argument("--layers", type=int, default=2, help="(default: %(default)s)")
        group.add_argument("--hidden", type=int, default=256, help="a multiple of 64 (default: %(default)s)")
        group.add_argument("--vocab", type=int, default=8192, help="tokens that the draft knows (default: %(default)s)")

    @staticmethod
    def open(asked: argparse.Namespace, setting: Setting) -> ModelDraft:
        if asked.hidden % HEAD_DIM or asked.hidden <= 0:
            raise ValueError(f"--hidden {asked.hidden} is no multiple of {HEAD_DIM}")
        source = setting.target
        whole = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
        config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
        unknown = config.get("unk_token") or whole["model"].get("unk_token")
        unknown = unknown.get("content") if hasattr(unknown, "get") else unknown
        rows = embedding(source)
        vocabulary = choose(setting.text, whole, unknown, len(rows), asked.vocab)
        with torch.random.fork_rng():
            torch.manual_seed(setting.seed)
            net = llama(source, asked.layers, asked.hidden, vocabulary)
        with torch.no_grad():
            start = compressed(rows[torch.from_numpy(vocabulary.kept)], asked.hidden)
            net.model.embed_tokens.weight[: len(start)].copy_(start)
        return ModelDraft(source, net, vocabulary)

    def loss(self, batch: Sequence[Record]) -> Tensor:
        tokens, places, candidates, logprobs = packed(batch, self._vocabulary.unknown, self._to_draft)
        hidden = self.net.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)[places]
        scores = functional.log_softmax(self.net.lm_head(hidden).float(), -1)
        likely = scores.gather(1, self._to_draft[candidates])
        weight = logprobs.exp() * self._guessed[candidates]
        weight[:, 0] += HARD * self._guessed[candidates[:, 0]]
        return -(weight * likely).sum() / len(places)

    def hits(self, record: Record, depth: int) -> NDArray[np.bool_]:
        """A draft that has been right so far has read the text itself: one pass over it says what every draft would have been."""
        tokens = torch.from_numpy(record.tokens.astype(np.int64))
        with torch.inference_mode():
            hidden = self.net.model(input_ids=self._to_draft[tokens][None], use_cache=False).last_hidden_state[0, record.prompt - 1 : -1]
            guesses = self.net.lm_head(hidden).argmax(-1)
        right = ((guesses == self._to_draft[tokens[record.prompt :]]) & self._guessed[tokens[record.prompt :]]).numpy()
        padded = np.concatenate([right, np.zeros(depth, bool)])
        return np.stack([padded[d : d + len(right)] for d in range(depth)], -1)

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def config(self) -> dict[str, Any]:
        return dict(self.net.config.to_dict()) | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}

    def save(self, folder: Path) -> None:
        """An ordinary Llama folder, in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in self.net.state_dict().items()}
        tensors.pop("lm_head.weight", None)
        store(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config(), indent=2, sort_keys=True) + "\n")
        write_tokenizer(self._source, folder, self._vocabulary)


def store(tensors: dict[str, Tensor], path: Path) -> None:
    """Readable to everybody, like what lies beside it: whoever serves a draft need not be who trained it."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file leaves it readable to its owner alone


def llama(source: Path, layers: int, hidden: int, vocabulary: Vocabulary) -> Any:
    """A random Llama with the target's special tokens and positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    target = json.loads((source / "config.json").read_text())
    target = target.get("text_config", target)
    ids = vocabulary.to_draft()
    heads = hidden // HEAD_DIM
    config = LlamaConfig(
        vocab_size=vocabulary.size,
        hidden_size=hidden,
        intermediate_size=-(-8 * hidden // (3 * 64)) * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads if heads % 2 else heads // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=target.get("max_position_embeddings", 4096),
        tie_word_embeddings=True,
        **{name: _mapped(target.get(name), ids) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    net: Any = LlamaForCausalLM(config)
    return net.float()


def _mapped(value: Any, ids: NDArray[np.int64]) -> Any:
    if value is None:
        return None
    return [int(ids[one]) for one in value] if hasattr(value, "__len__") else int(ids[value])


def embedding(source: Path) -> Tensor:
    """float32 [vocab, hidden]: the target's input embedding."""
    checkpoint = open_checkpoint(source)
    names = [name for name in checkpoint.names() if name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight"))]
    if not names:
        raise ValueError(f"{source} has no input embedding under a known name (embed_tokens, wte, embed_in)")
    return checkpoint.read(names[0]).float()


def compressed(rows: Tensor, hidden: int) -> Tensor:
    """rows [n, wide] → [n, hidden]: principal components, scaled to the usual size of a fresh embedding; zeros beyond `wide`."""
    centred = rows - rows.mean(0)
    directions = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, :hidden]
    small = functional.pad(centred @ directions, (0, hidden - directions.shape[1]))
    return 0.02 * small / small.std()


def packed(batch: Sequence[Record], filler: int, to_draft: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Texts one behind the other in rows of ROW tokens. Returns draft ids [rows, ROW], the flat places whose next token was generated [p],
    and there the target's candidates [p, width] (target ids) and their log-probabilities."""
    tokens, places, at = [], [], 0
    for record in batch:
        tokens.append(record.tokens)
        places.append(np.arange(at + record.prompt - 1, at + len(record.tokens) - 1))
        at += len(record.tokens)
    width = min(ROW, at)
    ids = to_draft[torch.from_numpy(np.concatenate(tokens).astype(np.int64))]
    ids = functional.pad(ids, (0, -at % width), value=filler).view(-1, width)
    candidates = torch.from_numpy(np.concatenate([record.candidates for record in batch]).astype(np.int64))
    logprobs = torch.from_numpy(np.concatenate([record.logprobs for record in batch]).astype(np.float32))
    return ids, torch.from_numpy(np.concatenate(places)), candidates, logprobs
