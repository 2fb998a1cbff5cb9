"""A part of the target's vocabulary, as a tokenizer of its own.

A small draft spends most of its time in its output head. Most tokens are never written, so the draft knows the frequent ones only; to it
every other token is the unknown token, which it reads but never guesses. Ids are new, from 0 on, in the order of the target's ids.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.train.shards import Record

PROMPT_WEIGHT = 0.1
"""how much a token of a prompt counts beside one that the target wrote"""
UNKNOWN = "<|unknown|>"
"""the unknown token of a target that has none"""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """`kept`: target ids, ascending; draft id i is kept[i]. `unknown`: the draft id of every other token; it is the last one, beyond
    `kept`, where the target has no unknown token. `covered`: share of written tokens that are kept."""

    kept: NDArray[np.int64]
    unknown: int
    covered: float
    vocab: int

    @property
    def size(self) -> int:
        return max(len(self.kept), self.unknown + 1)

    def to_draft(self) -> NDArray[np.int64]:
        """[vocab]: the draft id of each target id."""
        ids = np.full(self.vocab, self.unknown, np.int64)
        ids[self.kept] = np.arange(len(self.kept))
        return ids


def expected_counts(text: Sequence[Record], vocab: int) -> NDArray[np.float64]:
    """How often each token would be written: the sum of its probabilities, which says more of rare ones than counting does."""
    counts = np.zeros(vocab)
    for record in text:
        np.add.at(counts, record.candidates.ravel(), np.exp(record.logprobs.astype(np.float32)).ravel())
        np.add.at(counts, record.tokens[: record.prompt], PROMPT_WEIGHT)
    return counts


def choose(text: Sequence[Record], tokenizer: dict[str, Any], unknown: str | None, vocab: int, size: int) -> Vocabulary:
    """`tokenizer`: the target's tokenizer.json; `unknown`: its unknown token. Special tokens are always kept."""
    ids = token_ids(tokenizer)
    always = sorted({added["id"] for added in tokenizer.get("added_tokens", []) if added.get("special") and added["id"] < vocab})
    if unknown in ids:
        always = sorted({*always, ids[unknown]})
    room = size - (unknown not in ids)
    if room < len(always):
        raise ValueError(
            f"the target has {len(always)} special tokens: a draft vocabulary of {size} is too small, use --vocab {2 * len(always)}"
        )
    counts = expected_counts(text, vocab)
    counts[always] = np.inf
    named = np.zeros(vocab, bool)
    named[[place for place in ids.values() if place < vocab]] = True
    counts[~named] = -1.0
    kept = np.sort(np.argsort(-counts, kind="stable")[: min(room, int(named.sum()))])
    written = np.concatenate([record.tokens[record.prompt :] for record in text])
    unknown_id = int(np.searchsorted(kept, ids[unknown])) if unknown in ids else len(kept)
    return Vocabulary(kept, unknown_id, float(np.isin(written, kept).mean()), vocab)


def token_ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Every token of a tokenizer.json, the added ones included."""
    model = tokenizer["model"]["vocab"]
    ids = dict(model) if hasattr(model, "items") else {token: place for place, (token, _) in enumerate(model)}
    return ids | {added["content"]: added["id"] for added in tokenizer.get("added_tokens", [])}


def write_tokenizer(source: Path, folder: Path, vocabulary: Vocabulary) -> None:
    """tokenizer.json and tokenizer_config.json of the draft. What a template adds to a text is left out: a draft is fed tokens."""
    whole = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    place = {int(target): draft for draft, target in enumerate(vocabulary.kept)}
    model = whole["model"]
    vocab = model["vocab"]
    if hasattr(vocab, "items"):
        model["vocab"] = {token: place[at] for token, at in vocab.items() if at in place}
        if "merges" in model:
            model["merges"] = _merges(model["merges"], model["vocab"])
    else:
        model["vocab"] = [vocab[at] for at in vocabulary.kept.tolist() if at < len(vocab)]
    whole["added_tokens"] = [added | {"id": place[added["id"]]} for added in whole.get("added_tokens", []) if added["id"] in place]
    if vocabulary.unknown == len(vocabulary.kept):
        entry = {"id": vocabulary.unknown, "content": UNKNOWN, "single_word": False, "lstrip": False, "rstrip": False}
        whole["added_tokens"].append(entry | {"normalized": False, "special": True})
        config["unk_token"] = UNKNOWN
    whole["post_processor"] = None
    names = {id: token for token, id in token_ids(whole).items()}
    if "unk_token" in model:
        model["unk_token"] = names[vocabulary.unknown]
    if "unk_id" in model:
        model["unk_id"] = vocabulary.unknown
    for name in ("added_tokens_decoder", "chat_template", "extra_special_tokens", "additional_special_tokens"):
        config.pop(name, None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _merges(merges: list[Any], vocab: dict[str, int]) -> list[Any]:
    """The merges whose parts and whole are still there. A merge is a pair, or in older files two words with a space between."""
    kept = []
    for merge in merges:
        left, right = merge.split(" ", 1) if hasattr(merge, "split") else merge
        if left in vocab and right in vocab and left + right in vocab:
            kept.append(merge)
    return kept
