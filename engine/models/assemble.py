"""From a checkpoint to a `Decoder`: which tensors make which weight, packed layer by layer.

A checkpoint may hold Q, K, V or gate, up apart or already joined, experts one by one or stacked. Biases may be where nobody expects them.
Every tensor must be used: one that nothing asks for means that the model is not what its configuration says, and is an error.
The memory of a layer's source tensors is given back before the next is read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from forerun.backends.base import Backend, PoolSpec, Weight
from forerun.engine.errors import StartError
from forerun.engine.models.decoder import Attention, Block, Decoder, Layer, Linear, Mixture, Mlp, Stack
from forerun.engine.models.quantised import Formats, Matrix, joined, settled
from forerun.engine.models.rotary import tables
from forerun.engine.models.spec import Experts, LayerSpec, ModelSpec
from forerun.engine.weights import Checkpoint

FORMATS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
"""Where a checkpoint keeps the decoder: usual, multimodal (transformers 5 and 4), and the bare model without a head."""
IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|(^|\.)(vision_tower|multi_modal_projector|vision_model|mm_projector|mtp|mtp_layers|medusa_head)\."
)
"""What a decoder does not compute with: other modalities, and heads that belong to a drafter."""

Progress = Callable[[str, int, int], None]
AnyMatrix = TypeVar("AnyMatrix", Tensor, Matrix)


def assemble(
    spec: ModelSpec, checkpoint: Checkpoint, backend: Backend, dtype: torch.dtype, formats: Formats, limit: int, progress: Progress
) -> Decoder:
    """`limit`: the longest sequence. `progress(stage, done, total)` counts layers, embedding and head included."""
    return Assembly(spec, checkpoint, backend, dtype, formats, limit).build(progress)


class Assembly:
    """One load. `used`: tensor names that were asked for; `bytes`: what the weights take so far; `packed`: in which formats."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, backend: Backend, dtype: torch.dtype, formats: Formats, limit: int) -> None:
        self.spec = spec
        self.checkpoint = checkpoint
        self.backend = backend
        self.dtype = dtype
        self.formats = formats
        self.limit = limit
        self.names = checkpoint.names()
        self.prefix = self.find_prefix()
        self.used: set[str] = set()
        self.bytes = 0
        self.packed: set[str] = set()

    def find_prefix(self) -> str:
        for prefix in PREFIXES:
            if f"{prefix}embed_tokens.weight" in self.names:
                return prefix
        raise StartError(f"the checkpoint has no embed_tokens.weight, which a {self.spec.family} has", "fetch the model again")

    def build(self, progress: Progress) -> Decoder:
        spec, total = self.spec, len(self.spec.layers) + 2
        progress("loading", 0, total)
        table = self.keep(self.tensor("embed_tokens.weight", (spec.vocab, spec.hidden)).to(self.dtype, copy=True))
        self.checkpoint.release()
        rotations = [self.rotation(index) for index in range(len(spec.ropes))]
        still = (torch.empty(self.positions, 0, device=self.backend.device),) * 2
        progress("loading", 1, total)
        first = self.norm_before(0)
        layers = []
        for index, layer in enumerate(spec.layers):
            layers.append(self.layer(index, layer, still if layer.rope is None else rotations[layer.rope]))
            self.checkpoint.release()
            progress("loading", index + 2, total)
        head = self.head()
        self.checkpoint.release()
        self.refuse_unused()
        progress("loading", total, total)
        scale = float(torch.tensor(spec.embed_scale, dtype=self.dtype)) if spec.round_embed_scale else spec.embed_scale
        stack = Stack(table, scale, first, layers, head, spec.logits_scale, spec.logits_softcap, spec.residual_scale, spec.norm_eps)
        attention = spec.layers[0].attention
        pool = PoolSpec(len(layers), attention.kv_heads, attention.head_dim, self.dtype)
        facts = {
            "model": f"{spec.family}, own decoder",
            "rope": ", ".join(rope.kind for rope in spec.ropes),
            "weights": ", ".join(sorted(self.packed)),
        }
        return Decoder(stack, self.backend, pool, self.limit, self.bytes, str(self.dtype).removeprefix("torch."), facts)

    @property
    def positions(self) -> int:
        """Rows of the rotation tables: a guess may stand behind the last position that a sequence can reach."""
        return self.limit + self.backend.caps.max_nodes

    def rotation(self, index: int) -> tuple[Tensor, Tensor]:
        cos, sin = tables(self.spec.ropes[index], self.limit, self.positions)
        return self.keep(cos), self.keep(sin)

    def layer(self, index: int, layer: LayerSpec, rotation: tuple[Tensor, Tensor]) -> Layer:
        at, norms = f"layers.{index}.", self.spec.norms
        return Layer(
            attention=self.attention(f"{at}self_attn.", layer, rotation),
            after_attention=self.norm(at, norms.after_attention),
            before_mlp=self.norm(at, norms.before_mlp),
            mlp=self.mlp(f"{at}mlp.") if layer.experts is None else self.mixture(at, layer.experts),
            after_mlp=self.norm(at, norms.after_mlp),
            before_next=self.norm_before(index + 1),
        )

    def norm_before(self, index: int) -> Tensor | None:
        """The norm in front of layer `index`, or of the head."""
        if index == len(self.spec.layers):
            return self.norm("", "norm")
        return self.norm(f"layers.{index}.", self.spec.norms.before_attention)

    def attention(self, at: str, layer: LayerSpec, rotation: tuple[Tensor, Tensor]) -> Attention:
        spec = layer.attention
        widths = {"q_proj": spec.heads * spec.head_dim, "k_proj": spec.kv_heads * spec.head_dim, "v_proj": spec.kv_heads * spec.head_dim}
        return Attention(
            qkv=self.joined(at, "qkv_proj", widths, self.spec.hidden),
            out=self.joined(at, "o_proj", {"o_proj": self.spec.hidden}, spec.heads * spec.head_dim),
            q_norm=self.head_norm(f"{at}q_norm.weight", spec.head_dim, spec.heads),
            k_norm=self.head_norm(f"{at}k_norm.weight", spec.head_dim, spec.kv_heads),
            cos=rotation[0],
            sin=rotation[1],
            spec=spec,
            eps=self.spec.norm_eps,
        )

    def mlp(self, at: str) -> Block:
        width = self.width(at, "gate_proj", "gate_up_proj")
        gate_up = self.joined(at, "gate_up_proj", {"gate_proj": width, "up_proj": width}, self.spec.hidden, halves=True)
        return Mlp(gate_up, self.joined(at, "down_proj", {"down_proj": self.spec.hidden}, width), self.spec.activation)

    def mixture(self, at: str, experts: Experts) -> Block:
        hidden, count = self.spec.hidden, experts.count
        block = f"{at}{experts.block}." if f"{self.prefix}{at}{experts.block}.gate.weight" in self.names else f"{at}mlp."
        router = self.pack(self.tensor(f"{block}gate.weight", (count, hidden)), None)
        gate_up, down = [], []
        if f"{self.prefix}{block}experts.gate_up_proj" in self.names:  # stacked: [experts, out, in]
            inner = self.checkpoint.shape(self.full(f"{block}experts.down_proj"))[-1]
            shapes = {"gate_up_proj": (count, 2 * inner, hidden), "down_proj": (count, hidden, inner)}
            stacked = [self.tensor(f"{block}experts.{name}", shape) for name, shape in shapes.items()]
            gate_up, down = ([self.pack(one, self.formats.layers) for one in each] for each in stacked)
        else:
            gate, up, out = (f"{block}experts.{{}}.{name}.weight" for name in experts.names)
            inner = self.checkpoint.shape(self.full(gate.format(0)))[0]
            for expert in range(count):
                both = [self.matrix(name.format(expert), (inner, hidden)) for name in (gate, up)]
                gate_up.append(self.pack(joined(both), self.formats.layers))
                down.append(self.pack(self.matrix(out.format(expert), (hidden, inner)), self.formats.layers))
        if len({weight.format for weight in (*gate_up, *down)}) > 1:
            raise StartError(f"the experts of {block} are quantised in several ways", "use a checkpoint in which they are alike")
        return Mixture(router, gate_up, down, experts.top_k, self.spec.activation, experts.normalize)

    def head(self) -> Weight:
        spec = self.spec
        shape = (spec.vocab, spec.hidden)
        own = next((name for name in ("lm_head.weight", "language_model.lm_head.weight") if name in self.names), None)
        if own is not None:
            self.used.add(own)
        if own is None and not spec.tied:
            cure = "fetch the model again; if its output head is its embedding, set tie_word_embeddings in config.json"
            raise StartError(f"the checkpoint lacks lm_head.weight, which config.json says a {spec.family} has", cure)
        name = f"{self.prefix}embed_tokens.weight" if spec.tied or own is None else own
        return self.pack(self.checked(name, self.formats.read(self.checkpoint, name), shape), self.formats.head)

    def joined(self, at: str, whole: str, parts: dict[str, int], columns: int, halves: bool = False) -> Linear:
        """One matrix from its parts, or as the checkpoint has it joined. `parts`: name → rows. `halves`: packed for `ops.mlp`."""
        biased = not self.spec.biased.isdisjoint(parts)
        if f"{self.prefix}{at}{whole}.weight" in self.names:
            parts = {whole: sum(parts.values())}
        matrices = [self.matrix(f"{at}{name}.weight", (rows, columns)) for name, rows in parts.items()]
        biases = [self.bias(f"{at}{name}.bias", rows, biased) for name, rows in parts.items()]
        weight = self.pack(joined(matrices), self.formats.layers, halves)
        if not any(map(torch.is_tensor, biases)):
            return Linear(weight, None)
        bias = [torch.zeros(rows) if bias is None else bias for bias, rows in zip(biases, parts.values())]
        return Linear(weight, self.keep(torch.cat(bias)))

    def bias(self, name: str, rows: int, must: bool) -> Tensor | None:
        """None where the checkpoint has none. `must`: then it is not whole."""
        full = self.prefix + name
        if full in self.names:
            return self.tensor(name, (rows,)).float()
        if must:
            cure = "fetch the model again; if it was trained without, config.json must not say attention_bias or mlp_bias"
            raise StartError(f"the checkpoint lacks {full}, which a {self.spec.family} of this config.json has", cure)
        return None

    def width(self, at: str, part: str, whole: str) -> int:
        """Rows of a part of a matrix, whether it is stored apart or in two joined halves."""
        if f"{self.prefix}{at}{whole}.weight" in self.names:
            return self.checkpoint.shape(f"{self.prefix}{at}{whole}.weight")[0] // 2
        return self.checkpoint.shape(self.full(f"{at}{part}.weight"))[0]

    def norm(self, at: str, name: str | None) -> Tensor | None:
        if name is None:
            return None
        return self.norm_weight(f"{at}{name}.weight", (self.spec.hidden,))

    def head_norm(self, name: str, width: int, heads: int) -> Tensor | None:
        normed = self.spec.head_norms
        return self.norm_weight(name, (width if normed == "each" else width * heads,)) if normed else None

    def norm_weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.keep(self.tensor(name, shape).float() + self.spec.norm_offset)

    def full(self, name: str) -> str:
        """The name in the checkpoint of something that must be there."""
        full = self.prefix + name
        if full not in self.names:
            raise StartError(f"the checkpoint lacks {full}, which a {self.spec.family} has", "fetch the model again")
        self.used.add(full)
        return full

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        full = self.full(name)
        return self.checked(full, self.checkpoint.read(full), shape)

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """A weight of a product, as numbers or as the codes it is stored in."""
        full = self.full(name)
        return self.checked(full, self.formats.read(self.checkpoint, full), shape)

    def checked(self, name: str, tensor: AnyMatrix, shape: tuple[int, ...]) -> AnyMatrix:
        if tuple(tensor.shape) != shape:
            raise StartError(
                f"{name} is {list(tensor.shape)}, config.json and the other weights say {list(shape)}",
                "fetch config.json and weights of the same revision",
            )
        if torch.is_tensor(tensor) and (not tensor.is_floating_point() or tensor.dtype.itemsize < 2):
            raise StartError(f"{name} is stored as {tensor.dtype}", "use the unquantised checkpoint of this model")
        return tensor

    def pack(self, matrix: Matrix, format: str | None, halves: bool = False) -> Weight:
        """`format`: what numbers are packed as, None = the model's type. Codes keep their own, if it has no more bits. `halves`: for
        `ops.mlp`."""
        matrix = settled(matrix, format)
        if torch.is_tensor(matrix):
            weight = self.backend.pack(matrix, format or FORMATS[self.dtype], halves)
        else:
            weight = self.backend.pack_codes(matrix, halves)
        self.bytes += weight.bytes
        self.packed.add(weight.format)
        return weight

    def keep(self, tensor: Tensor) -> Tensor:
        """A tensor that is used as it is, on the device."""
        self.bytes += tensor.nbytes
        return tensor.to(self.backend.device)

    def beyond(self) -> tuple[str, ...]:
        """What names of MTP modules behind the last layer begin with, where there are any."""
        at, names = f"{self.prefix}layers.{{}}.", self.names
        modules = itertools.takewhile(lambda i: f"{at.format(i)}eh_proj.weight" in names, itertools.count(len(self.spec.layers)))
        return tuple(at.format(i) for i in modules)

    def refuse_unused(self) -> None:
        unused = sorted(name for name in self.names - self.used if not IGNORED.search(name) and not name.startswith(self.beyond()))
        if unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            raise StartError(
                f"a {self.spec.family} has no {', '.join(unused[:3])}{more}, but the checkpoint has",
                "check that config.json and the weights belong together; adapters must be merged first",
            )
