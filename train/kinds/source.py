"""The target as the heads see it: its sizes, and the weights that a head begins with or shares.

A head that starts from the target's own last layer, embedding and output head has to learn the difference only. Where the target has no
tensor of that name and shape, the head keeps its random start.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from forerun.drafting import fingerprint
from forerun.engine.drafters.vocabulary import texts
from forerun.engine.weights import Checkpoint, open_checkpoint
from forerun.train.kinds.model import embedding, store
from forerun.train.kinds.registry import Setting
from forerun.train.vocabulary import Vocabulary, choose

HEADS = ("lm_head.weight", "output.weight", "embed_out.weight")


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Sizes of the target in `folder`, from its config."""

    folder: Path
    config: dict[str, Any]
    checkpoint: Checkpoint
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    eps: float
    theta: float
    reach: int

    @classmethod
    def open(cls, folder: Path) -> Source:
        """ValueError for a target whose config does not name its sizes as Llama's does."""
        whole = json.loads((folder / "config.json").read_text())
        config = whole.get("text_config", whole)
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            layers, inner = int(config["num_hidden_layers"]), int(config["intermediate_size"])
        except KeyError as missing:
            cure = "heads can be trained for targets of Llama's kind, use --kind model"
            raise ValueError(f"{folder}: config.json has no {missing}; {cure}") from missing
        rope = config.get("rope_parameters") or {}
        return cls(
            folder,
            config,
            open_checkpoint(folder),
            hidden,
            layers,
            heads,
            int(config.get("num_key_value_heads") or heads),
            int(config.get("head_dim") or hidden // heads),
            inner,
            float(config.get("rms_norm_eps", 1e-5)),
            float(config.get("rope_theta") or rope.get("rope_theta", 10000.0)),
            int(config.get("max_position_embeddings", 4096)),
        )

    def embedding(self) -> Tensor:
        """float32 [V, hidden]."""
        return embedding(self.folder)

    def head(self) -> Tensor:
        """float32 [V, hidden]: the output head, which may be the embedding."""
        names = self.checkpoint.names()
        found = next((name for name in HEADS if name in names), None)
        return self.embedding() if found is None else self.checkpoint.read(found).float()

    def begin(self, parameter: Tensor, name: str) -> None:
        """The parameter starts as the target's tensor of this name, if there is one of its shape, or one whose heads [of `head_dim` rows]
        fill it when each is repeated: more query heads then have keys and values of their own."""
        if name not in self.checkpoint.names():
            return
        found = self.checkpoint.read(name)
        if "_proj" in name and len(parameter) > len(found) and len(parameter) % len(found) == 0:
            found = found.view(-1, self.head_dim, found.shape[1]).repeat_interleave(len(parameter) // len(found), 0).flatten(0, 1)
        if found.shape == parameter.shape:
            with torch.no_grad():
                parameter.copy_(found)

    def begin_layer(self, layer: nn.Module) -> None:
        """A decoder layer of Llama's names starts as the target's last."""
        for name, parameter in layer.named_parameters():
            self.begin(parameter, f"model.layers.{self.layers - 1}.{name}")

    def fingerprint(self) -> str:
        """Of what its ids stand for: a target of equal sizes with another tokenizer is another target."""
        return fingerprint(texts(self.folder))

    def sizes(self) -> dict[str, Any]:
        """What every head's config.json says of a layer, and of the target whose states it reads."""
        ids = {name: self.config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in self.config}
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "max_position_embeddings": self.reach,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "tokenizer_fingerprint": self.fingerprint(),
        } | ids


class Head(Protocol):
    """What reads a drafter's last states. `size`: tokens that can be guessed."""

    size: int

    def logits(self, x: Tensor) -> Tensor:
        """[p, hidden] → [p, K]: of the tokens that are learnt."""
        ...

    def best(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """[p, hidden] → int64 [p], target ids of the likeliest guesses. `added` [p, size]: to the logits."""
        ...

    def learnt(self, rows: Tensor) -> Tensor:
        """rows [size, …] → [K, …], those of the tokens that are learnt."""
        ...


class SharedHead:
    """The target's output head, which stays as it is. Learning looks at the rows of `kept` tokens alone (a head of 49,152 tokens costs more
    than all else), measuring at all of them."""

    def __init__(self, whole: Tensor, kept: Tensor) -> None:
        self.size = len(whole)
        self._whole, self._kept, self._part = whole, kept, whole[kept]

    def logits(self, x: Tensor) -> Tensor:
        return x @ self._part.T

    def best(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        logits = x @ self._whole.T
        return (logits if added is None else logits + added).argmax(-1)

    def learnt(self, rows: Tensor) -> Tensor:
        return rows[self._kept]


class OwnHead(nn.Module):
    """An output head of `kept` tokens alone, which begins as the target's rows and learns."""

    def __init__(self, whole: Tensor, kept: Tensor) -> None:
        super().__init__()
        self.size = len(kept)
        self._kept = kept
        self.weight = nn.Parameter(whole[kept].clone())

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.weight.T

    def best(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        logits = self.logits(x)
        return self._kept[(logits if added is None else logits + added).argmax(-1)]

    def learnt(self, rows: Tensor) -> Tensor:
        return rows


def reduction(kept: Tensor, vocab: int) -> dict[str, Tensor]:
    """How published heads say which of the target's `vocab` tokens theirs are: draft id + d2t = target id; t2d: which have one."""
    known = torch.zeros(vocab, dtype=torch.bool)
    known[kept] = True
    return {"d2t": kept - torch.arange(len(kept)), "t2d": known}


def frequent(setting: Setting, vocab: int, size: int) -> Vocabulary:
    """The `size` tokens that the target writes most, special ones included; all others are unknown."""
    whole = json.loads((setting.target / "tokenizer.json").read_text(encoding="utf-8"))
    return choose(setting.text, whole, None, vocab, size + 1)


def drafted(setting: Setting, vocab: int, size: int) -> Vocabulary:
    """The tokens that a head can guess which has an output head of its own: the `size` most frequent ones, or, where it goes on from
    another head, that one's."""
    if setting.begins is None:
        return frequent(setting, vocab, size)
    kept = kept_by(setting.begins)
    if kept[-1] >= vocab:
        raise ValueError(f"--from {setting.begins}: this head guesses tokens that the target does not have: it is of another target")
    written = np.concatenate([record.tokens[record.prompt :] for record in setting.text])
    return Vocabulary(kept, len(kept), float(np.isin(written, kept).mean()), vocab)


def kept_by(folder: Path) -> NDArray[np.int64]:
    """The target ids that the head in `folder` can guess (`d2t`). ValueError for one without a vocabulary of its own."""
    checkpoint = open_checkpoint(folder)
    if "d2t" not in checkpoint.names():
        raise ValueError(f"--from {folder}: this head has no draft vocabulary (d2t): train one anew, without --from")
    offsets = checkpoint.read("d2t").numpy().astype(np.int64)
    return offsets + np.arange(len(offsets))


def to_draft(vocabulary: Vocabulary) -> Tensor:
    """int64 [vocab]: the draft id of each target id, −1 = none."""
    ids = torch.full((vocabulary.vocab,), -1, dtype=torch.int64)
    ids[torch.from_numpy(vocabulary.kept)] = torch.arange(len(vocabulary.kept))
    return ids


def facts(net: nn.Module, speculator: str, vocabulary: int, covers: float) -> dict[str, Any]:
    """For the report. `vocabulary`: tokens that can be guessed; `covers`: the share of what is written that they are."""
    parameters = sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)
    return {"speculator": speculator, "parameters": parameters, "vocabulary": vocabulary, "vocabulary_covers": round(covers, 4)}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], name: str = "model") -> None:
    """config.json and NAME.safetensors; floating tensors in bfloat16, others as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: value.detach().to(torch.bfloat16) if value.is_floating_point() else value for name, value in tensors.items()}
    store({name: value.contiguous() for name, value in stored.items()}, folder / f"{name}.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
