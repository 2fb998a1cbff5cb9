"""Any other decoder-only architecture: the unmodified transformers model over our paged KV, through a registered attention function.

    [1, n] flat rows → transformers' own embedding, blocks and head
                        every attention call → `Bridge.attend` → ops.write_kv, ops.attention
                        every nn.Linear, Conv1D and nn.Embedding → the backend's packed products

Whether a model may be run this way is not looked up but tried at the start (`inspect`): with attention switched off, rows must not
influence each other, equal tokens at equal positions must give equal rows, and every layer must call attention once, in one shape of KV. A
model that mixes rows by other means (a state-space layer, a convolution), or adds biases to scores, is refused with the reason.
`VERIFIED` names the architectures whose logits a test compares with transformers' own; others run with a note.

Step metadata travels in the bridge, not in keyword arguments: some models do not pass those on. A 4-dimensional dummy mask is given,
because transformers looks for packed sequences in the positions otherwise.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect as signatures
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from forerun.backends.base import AttentionSpec, Backend, Ops, Pool, PoolSpec, Weight
from forerun.engine.batch import Batch
from forerun.engine.errors import StartError
from forerun.engine.models.assemble import FORMATS, Progress
from forerun.engine.models.ends import share_ends
from forerun.engine.models.model import Output, Shared

VERIFIED = (
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "BioGptForCausalLM",
    "CodeGenForCausalLM",
    "Cohere2ForCausalLM",
    "CohereForCausalLM",
    "CwmForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Exaone4ForCausalLM",
    "FlexOlmoForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoXForCausalLM",
    "GlmForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "Ministral3ForCausalLM",
    "NanoChatForCausalLM",
    "NemotronForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoForCausalLM",
    "OlmoeForCausalLM",
    "OPTForCausalLM",
    "PersimmonForCausalLM",
    "PhiForCausalLM",
    "Qwen2MoeForCausalLM",
    "SeedOssForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "VaultGemmaForCausalLM",
)
"""Architectures that a test holds to transformers' own logits (tests/engine/test_models_transformers.py)."""

PASSED_ON = {"position_ids", "cache_position", "attention_mask"}
"""Tensors that models hand to attention and that change nothing in it."""


class PackedLinear(nn.Module):
    """A linear layer on the backend's packed weight. x [..., in] → float32 [..., out]."""

    def __init__(self, ops: Ops, weight: Weight, bias: Tensor | None) -> None:
        super().__init__()
        self.ops, self.packed, self.bias = ops, weight, bias
        self.weight = torch.empty(0)  # some models ask for its type or device; one that reads its values fails in the inspection

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.packed.shape[1])
        if not rows.shape[0]:
            return rows.new_empty(*x.shape[:-1], self.packed.shape[0])
        return self.ops.matmul(rows.float(), self.packed, self.bias).view(*x.shape[:-1], self.packed.shape[0])


class PackedEmbedding(nn.Module):
    """A table in the weight type. tokens [...] → float32 [..., H]."""

    def __init__(self, ops: Ops, table: Tensor) -> None:
        super().__init__()
        self.ops, self.table = ops, table
        self.weight = torch.empty(0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.ops.embed(self.table, tokens.reshape(-1).int()).view(*tokens.shape, self.table.shape[1])


@dataclasses.dataclass(slots=True)
class Step:
    """One forward under way. `layer`: attention calls so far."""

    batch: Batch
    pool: Pool
    layer: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """An attention call as the inspection saw it. `query`, `key`: [1, heads, n, D]. `reason`: why it cannot be served, or empty."""

    spec: AttentionSpec
    value_dim: int
    query: Tensor
    key: Tensor
    reason: str


class Bridge:
    """The registered attention function and what it needs to know. Outside a step it records calls and returns zeros."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.name = f"forerun{id(self)}"
        self.step: Step | None = None
        self.seen: list[Seen] = []
        transformers.AttentionInterface.register(self.name, self.attend)
        transformers.AttentionMaskInterface.register(self.name, lambda *_, **__: None)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, None]:
        """query [1, heads, n, D], key and value [1, kv_heads, n, D] → [1, n, heads, D]."""
        if self.step is None:
            self.seen.append(observe(module, query, key, value, attention_mask, options))
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
        step, seen = self.step, self.seen[self.step.layer]
        spec, rows = seen.spec, query.shape[2]
        qkv = torch.cat([heads(query, spec.head_dim), heads(key, spec.head_dim), heads(value, spec.head_dim)], dim=1).float()
        self.ops.write_kv(qkv, step.pool, step.layer, step.batch.slots, spec)
        out = self.ops.attention(qkv, step.pool, step.layer, step.batch, spec)
        step.layer += 1
        return out.view(1, rows, spec.heads, spec.head_dim)[..., : seen.value_dim], None


def heads(x: Tensor, width: int) -> Tensor:
    """[1, heads, n, D] → [n, heads · width], each head padded with zeros."""
    rows = x[0].transpose(0, 1)
    return nn.functional.pad(rows, (0, width - x.shape[3])).reshape(rows.shape[0], -1)


def observe(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Seen:
    reason = ""
    if not options.get("is_causal", getattr(module, "is_causal", True)):
        reason = "attends in both directions"
    if mask is not None and bool(mask.any()):
        reason = "adds a bias to attention scores"
    sinks = options.pop("s_aux", None)
    extra = [name for name, given in options.items() if torch.is_tensor(given) and name not in PASSED_ON]
    if extra:
        reason = f"hands {', '.join(extra)} to attention"
    dim = max(query.shape[3], value.shape[3])
    spec = AttentionSpec(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=dim,
        scale=options.get("scaling") or query.shape[3] ** -0.5,
        window=options.get("sliding_window") or 0,
        softcap=options.get("softcap") or 0.0,
        sinks=None if sinks is None else sinks.detach().float(),
    )
    return Seen(spec, value.shape[3], query, key, reason)


class Adapted:
    """A transformers model as a `Model` (engine/models/model.py)."""

    def __init__(self, model: Any, bridge: Bridge, backend: Backend, max_tokens: int, dtype: torch.dtype) -> None:
        self.model = model
        self.bridge = bridge
        self.device = backend.device
        text = model.config.get_text_config()
        self.vocab, self.hidden, self.layers = text.vocab_size, text.hidden_size, text.num_hidden_layers
        self.max_tokens = max_tokens
        self.dtype = str(dtype).removeprefix("torch.")
        self.weight_bytes = pack_modules(model, backend, dtype)
        lists = (each for each in model.modules() if type(each) is nn.ModuleList and len(each) == self.layers)
        self.blocks = next(lists, nn.ModuleList())
        widths = [each.packed.shape[0] for each in self.blocks.modules() if type(each) is PackedLinear]
        if not widths:
            raise refused(type(model).__name__, f"has no list of {self.layers} layers with products in them")
        # Modules run one after the other: the stream, its norms and sums, and query, key and value as they are made, turned and joined.
        self.width = 8 * self.hidden + 6 * max(widths)
        self.some_logits = "logits_to_keep" in signatures.signature(model.forward).parameters
        self.states: dict[int, Tensor] = {}
        self.pool = inspect(self, dtype)
        if backend.caps.batch_invariant:
            route_row_by_row(model)  # after the inspection, from which it would hide a layer that mixes rows
        self.facts = {"model": f"{type(model).__name__} through transformers {transformers.__version__}{self.note()}"}
        self.listen()

    def note(self) -> str:
        return "" if type(self.model).__name__ in VERIFIED else " (not among the architectures that are tested)"

    def listen(self) -> None:
        """Hidden states for taps: what each decoder layer, and the body behind its final norm, returns."""
        for index, layer in enumerate(self.blocks):
            layer.register_forward_hook(self.hear(index))
        self.model.base_model.register_forward_hook(self.hear(self.layers))
        enter = self.hear(-1)
        self.blocks[0].register_forward_pre_hook(lambda m, given, named: enter(m, (), given or named["hidden_states"]), with_kwargs=True)

    def hear(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, result: Any) -> None:
            if index in self.states:
                self.states[index] = (result if torch.is_tensor(result) else result[0])[0]

        return hook

    def run(self, tokens: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """tokens, positions [n] → logits [n, V], or [m, V] of `rows`."""
        n = tokens.shape[0]
        mask = torch.zeros(1, device=self.device).expand(1, 1, n, n)
        keep = {"logits_to_keep": rows.long()} if rows is not None and self.some_logits else {}
        with torch.no_grad():
            out = self.model(
                input_ids=tokens.long()[None], attention_mask=mask, position_ids=positions.long()[None], use_cache=False, **keep
            )
        logits: Tensor = out.logits[0].float()
        return logits if rows is None or keep else logits[rows.long()]

    def forward(self, batch: Batch, pool: Pool, taps: tuple[int, ...] = ()) -> Output:
        self.states = dict.fromkeys(taps, batch.tokens)
        self.bridge.step = Step(batch, pool)
        # A guess may stand behind the last position that a sequence can reach; it is never kept, so its position may be any.
        logits = self.run(batch.tokens, batch.positions.clamp(max=self.max_tokens - 1), batch.logit_rows)
        return Output(logits, torch.cat([self.states[tap] for tap in taps], dim=1) if taps else None)

    def shared(self) -> Shared:
        self.bridge.step = None  # attention is switched off for a trial
        return share_ends(self, self.bridge.ops)


def load_transformers(
    folder: Path, backend: Backend, dtype: torch.dtype, limit: int, trust_remote_code: bool, allow_pickle: bool, progress: Progress
) -> Adapted:
    """A model of any architecture that transformers knows (or brings along, with `trust_remote_code`). `limit`: longest sequence, 0 = what
    the model allows. StartError if it cannot be served this way."""
    progress("loading", 0, 2)
    library: Any = transformers  # largely without types
    library.utils.logging.disable_progress_bar()
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    bridge = Bridge(backend.ops)
    try:
        config = copy.deepcopy(library.AutoConfig.from_pretrained(folder, **options))
        model = library.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=bridge.name, use_safetensors=None if allow_pickle else True, **options
        )
    except (ValueError, OSError, KeyError, ImportError, AttributeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        reason = "the model has no attention that can be replaced" if bridge.name in first else first
        raise StartError(f"transformers cannot load {folder}: {reason}", cure_for(str(error))) from error
    progress("loading", 1, 2)
    adapted = Adapted(model.eval(), bridge, backend, longest(config, limit), dtype)
    progress("loading", 2, 2)
    return adapted


def cure_for(message: str) -> str:
    if "trust_remote_code" in message:
        return "pass --trust-remote-code if you trust the code in the model folder"
    return "use an architecture listed in docs/models.md, or a newer transformers"


def longest(config: Any, limit: int) -> int:
    """Longest sequence: what is asked for, if the model has positions for it."""
    text = config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
    allowed = next((getattr(text, name) for name in names if getattr(text, name, None)), 2048)
    if limit > allowed:
        raise StartError(
            f"max_total_tokens {limit} is more than the model's {allowed} positions", f"use --max-total-tokens {allowed} or less"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    for kind in [rope.get("rope_type"), *(each.get("rope_type") for each in rope.values() if type(each) is dict)]:
        if kind in ("dynamic", "longrope"):
            raise StartError(
                f"rope scaling {kind} rotates by the longest sequence of a batch in transformers", "use a model of docs/models.md"
            )
    return limit or allowed


def pack_modules(model: nn.Module, backend: Backend, dtype: torch.dtype) -> int:
    """Swaps plain linear layers and embeddings for the backend's; everything else becomes float32. Returns the bytes of all."""
    packed = 0
    for name, module in list(model.named_modules()):
        replacement: nn.Module
        if type(module) in (nn.Linear, Conv1D):
            matrix = module.weight.T if type(module) is Conv1D else module.weight
            weight = backend.pack(matrix.detach(), FORMATS[dtype])
            packed += weight.bytes
            replacement = PackedLinear(backend.ops, weight, None if module.bias is None else module.bias.detach().float())
        elif type(module) is nn.Embedding:
            table = module.weight.detach().to(backend.device, dtype)
            packed += table.nbytes
            replacement = PackedEmbedding(backend.ops, table)
        else:
            continue
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replacement)
    model.requires_grad_(False).to(backend.device, torch.float32)
    return packed + sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def route_row_by_row(model: Any) -> None:
    """Experts stacked in one parameter are multiplied for all rows that chose them, and a sum's rounding follows how many did. Given one
    row at a time, a mixture's result depends on that row alone."""
    for name, module in model.named_modules():
        stacked = any(parameter.ndim > 2 for parameter in module.parameters(recurse=False))
        if stacked and not type(module).__module__.startswith("torch."):
            block = model.get_submodule(name.rpartition(".")[0])
            if "forward" not in vars(block):
                block.forward = functools.partial(row_by_row, block.forward)


def row_by_row(forward: Callable[..., Any], x: Tensor, *more: Any, **options: Any) -> Any:
    """x [..., n, H] → what `forward` makes of each row, joined along the rows."""
    parts = [forward(x.narrow(-2, row, 1), *more, **options) for row in range(x.shape[-2])]
    if torch.is_tensor(parts[0]):
        return torch.cat(parts, dim=-2)
    return tuple(torch.cat(each, dim=-2) for each in zip(*parts))


def inspect(adapted: Adapted, dtype: torch.dtype) -> PoolSpec:
    """Whether the model can be served row by row; the KV it needs. Leaves one `Seen` a layer in the bridge."""
    bridge, name = adapted.bridge, type(adapted.model).__name__

    def look(tokens: list[int], positions: list[int]) -> tuple[Tensor, list[Seen]]:
        bridge.seen = []
        logits = adapted.run(torch.tensor(tokens, device=adapted.device), torch.tensor(positions, device=adapted.device))
        return logits, bridge.seen

    try:
        one, _ = look([1, 2], [0, 1])
        other, _ = look([3, 2], [0, 1])
        logits, seen = look([2, 2], [3, 3])
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError, KeyError) as error:
        raise refused(name, f"fails on flat rows: {error}") from error
    if len(seen) != adapted.layers:
        raise refused(name, f"calls the attention interface {len(seen)} times in {adapted.layers} layers")
    for call in seen:
        if call.reason:
            raise refused(name, call.reason)
    if not close(one[1], other[1]):
        raise refused(name, "lets rows influence each other outside attention")
    if not close(logits[0], logits[1]) or not all(close(each[0, :, 0], each[0, :, 1]) for call in seen for each in (call.query, call.key)):
        raise refused(name, "takes positions from the order of rows")
    if reason := masked(adapted.model.config.get_text_config(), seen):
        raise refused(name, reason)
    shapes = {(call.spec.kv_heads, call.spec.head_dim) for call in seen}
    if len(shapes) != 1:
        raise refused(name, f"has layers with different KV shapes {sorted(shapes)}")
    kv_heads, head_dim = shapes.pop()
    return PoolSpec(len(seen), kv_heads, head_dim, dtype)


def masked(config: Any, seen: list[Seen]) -> str:
    """Masks are not looked at, so what a layer may see must come with the call. Why that is not so, or nothing."""
    types = getattr(config, "layer_types", None) or []
    other = sorted(set(types) - {"full_attention", "sliding_attention"})
    if other or getattr(config, "attention_chunk_size", None):
        return f"has layers of another kind ({', '.join(other) or 'chunked attention'})"
    if types:
        slides = any(kind == "sliding_attention" and not call.spec.window for kind, call in zip(types, seen))
    else:
        slides = bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True) and not seen[0].spec.window
    return "keeps its attention window to itself" if slides else ""


def close(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-3, atol=1e-4))


def refused(name: str, reason: str) -> StartError:
    return StartError(f"{name} cannot be served: it {reason}", "use an architecture listed in docs/models.md")
