"""Multi-token-prediction modules: `--speculator mtp` (in the target's own files) or `mtp=DIR` (2412.19437).

    x = W [norm(embedding of token p + 1) ; norm(h_p)]  ─▶ one decoder layer ─▶ norm ─▶ output head: token p + 2

Families store it under other names, and differ in what their files do not say (`mtp_trial.py`):

    layout      names                                               usual way
    DeepSeek    model.layers.L.{enorm, hnorm, eh_proj, …}           [e; h], features behind the final norm, carries its raw result
    GLM         the same, and its config says glm                   [e; h], behind, carries the normed result
    MiMo        model.mtp_layers.0.{token_layernorm, input_proj, …} [h; e], behind, normed
    Qwen        mtp.{fc, norm, pre_fc_norm_*}, mtp.layers.0.*       [e; h], behind, normed; norms are stored as w − 1

    mtp=DIR,first=pre|post,order=eh|he,carry=raw|normed             settles what is otherwise tried at start, on what the target writes
           ,reads=module|target                                     and, of several modules, what those behind the first read

One module is used over and over (`recursive.py`). Of several each guesses for its own place (`cascade.py`): DeepSeek's go on from what the
module before made, MiMo's all read the target. A layer is a Llama's or Qwen's (biases, norms of heads, a gate behind attention), or has
DeepSeek's latent attention; its MLP may be DeepSeek's mixture or Qwen's (`mtp_blocks.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

import torch

from forerun.backends.base import PoolSpec
from forerun.engine.drafters.cascade import Cascade, Stages
from forerun.engine.drafters.draft import Drafter
from forerun.engine.drafters.eagle import beams
from forerun.engine.drafters.entries import Made
from forerun.engine.drafters.heads import Heads, parse_value
from forerun.engine.drafters.lattice import Levels
from forerun.engine.drafters.mtp_blocks import accompanied, gated_attention, is_gated, latent_attention, routed
from forerun.engine.drafters.mtp_trial import Trial, Way, choose, write
from forerun.engine.drafters.recursive import Recursive
from forerun.engine.drafters.recursive_load import Embed, Frame, embedding, pool_of
from forerun.engine.drafters.recursive_net import Fusion, Joined, Net
from forerun.engine.drafters.registry import Host, Setting
from forerun.engine.errors import StartError
from forerun.engine.models.decoder import Attends, Block, Layer, Linear

log = logging.getLogger(__name__)

USUAL = Way()
MOST = 3
"""guesses for a row, unless told otherwise: one module that is used again and again gets worse quickly"""
OPTIONS = {"first": ("pre", "post"), "order": ("eh", "he"), "carry": ("raw", "normed"), "reads": ("module", "target")}
PARTS = {"first": ("pre", "pre"), "order": ("hidden_first", "he"), "carry": ("normed", "normed"), "reads": ("chained", "module")}
"""option → the part of a `Way` and the value that sets it"""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Names behind the prefix. `layer`: what stands before the layer's own, with the module's number; `offset`: of norm weights; `way`: the
    family's usual one, and `chained`, where there are several."""

    name: str
    project: str
    embed_norm: str
    hidden_norm: str
    norm: str
    head: str
    layer: str = ""
    offset: float = 0.0
    way: Way = USUAL
    chained: bool = True


DEEPSEEK = Layout("DeepSeek's", "eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head")
GLM = dataclasses.replace(DEEPSEEK, name="GLM's", way=Way(normed=True))
MIMO_WAY = Way(hidden_first=True, normed=True)
MIMO = Layout("MiMo's", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", "", way=MIMO_WAY, chained=False)
QWEN = Layout("Qwen's", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "", "layers.{}.", 1.0, Way(normed=True))
FOUND = (
    (re.compile(r"(.*(?<!mtp\.)layers\.(\d+)\.)eh_proj\.weight"), DEEPSEEK),
    (re.compile(r"(.*mtp_layers\.(\d+)\.)input_proj\.weight"), MIMO),
    (re.compile(r"(.*mtp\.)layers\.(\d+)\.input_layernorm\.weight"), QWEN),
)


class Mtp:
    """Opens the drafter; what runs is `Recursive`, or of several modules `Cascade`."""

    @staticmethod
    def open(value: str, setting: Setting) -> Drafter:
        host = setting.worker
        place, options = parse_value("mtp", value, OPTIONS, host.start.model_id)
        heads = Heads.open(place, host)
        layout, prefixes = find_layout(heads)
        usual = dataclasses.replace(layout.way, chained=layout.chained if len(prefixes) > 1 else None)
        if len(prefixes) == 1:
            options.pop("reads", None)
        for option, asked in options.items():
            part, set_by = PARTS[option]
            usual = dataclasses.replace(usual, **{part: asked == set_by})
        modules: list[Module] = []
        for prefix in prefixes:
            modules.append(read(dataclasses.replace(heads, prefix=prefix), layout, modules, host))
        for module in modules:
            module.frame.heads.close()
        way = tried(modules, usual, [PARTS[option][0] for option in options], host)
        first, count = modules[0], len(modules)
        log.info("%s: %s in %s layout, %s", heads.path, "an MTP module" if count == 1 else f"{count} MTP modules", layout.name, way)
        nets, tap = [module.net(way) for module in modules], host.model.layers - way.pre
        pool, levels = pool_of(first.frame.heads, [module.layer for module in modules]), Levels.open(host, setting.tree)
        weights, most = sum(module.frame.heads.bytes for module in modules), setting.nodes or max(MOST, count)
        if count > 1:
            embeds = [module.embed for module in modules]
            return Cascade(Stages(nets, embeds, tap, bool(way.chained), first.width, pool, weights), levels, host, most)
        return Recursive(Made(nets[0], (tap,), first.embed, first.width, pool, weights), levels, host, most, beams(None, setting))


def find_layout(heads: Heads) -> tuple[Layout, list[str]]:
    """The layout, and what stands before the names of each module. StartError where there is none."""
    names = heads.checkpoint.names()
    for pattern, layout in FOUND:
        found = sorted((int(match[2]), match[1]) for name in names if (match := pattern.fullmatch(name)))
        if found:
            glm = any("glm" in str(name).lower() for name in (heads.config.get("model_type"), *(heads.config.get("architectures") or [])))
            return GLM if layout is DEEPSEEK and glm else layout, [prefix for _, prefix in found]
    alien = any(re.search(r"mtp\.layers\.\d+\.eh_proj\.", name) for name in names)
    heads.demand(not alien, "MTP modules like MiMo-V2's are not read (values narrower than keys, sinks)", "use --speculator suffix")
    told = heads.config.get("num_nextn_predict_layers") or heads.config.get("mtp_num_hidden_layers")
    problem = "config.json names MTP modules, but their tensors are not there" if told else "there is no MTP module"
    raise StartError(
        f"{heads.path}: {problem}",
        "use a copy of this model that kept its MTP tensors (conversions often drop them), or mtp=DIR, or --speculator suffix",
    )


@dataclasses.dataclass(eq=False, slots=True)
class Module:
    """What was loaded, before it is known how it is read. `place`: which one it is, from 0."""

    place: int
    layout: Layout
    frame: Frame
    project: Linear
    norms: tuple[Any, Any, Any, Any]
    """of the embedding, of the features, in front of attention, in front of the head"""
    layer: Layer
    head: Any
    vocab: int
    embed: Embed
    width: int

    def net(self, way: Way) -> Net:
        eps = self.frame.eps
        entry = Joined(self.project, *self.norms[:3], way.hidden_first, eps)
        fusion = Fusion([], None, None, eps)
        hidden, normed = self.frame.hidden, way.normed
        return Net(fusion, entry, [self.layer], self.norms[3], normed, self.head, self.vocab, hidden, eps, lowest=self.place)


def read(heads: Heads, layout: Layout, before: list[Module], host: Host) -> Module:
    """The module with this prefix, behind those that were read. Embeddings and output heads are stored with each and mostly the same."""
    model, place = host.model, len(before)
    config = heads.config | (heads.config.get("text_config") or {})
    heads.demand(bool(config.get("hidden_size") and config.get("num_attention_heads")), "config.json does not describe a decoder layer")
    hidden = config["hidden_size"]
    heads.demand(hidden == model.hidden, f"its features are {hidden} wide, the target's are {model.hidden}: it was made for another target")
    frame = Frame(heads, config, host, layout.offset)
    table, end = "embed_tokens.weight", f"{layout.head}.weight"
    embed, width = (before[0].embed, before[0].width) if repeated(heads, before, table) else embedding(heads, host, table, model.vocab)
    at = layout.layer.format(place)
    norms = (
        frame.norm(layout.embed_norm, width),
        frame.norm(layout.hidden_norm),
        frame.norm(f"{at}input_layernorm"),
        frame.norm(layout.norm),
    )
    if repeated(heads, before, end):
        head = before[0].head
    else:
        head = Linear(heads.weight(end, model.vocab, hidden), None) if layout.head and heads.has(end) else model.shared().logits
    project = heads.linear(layout.project, hidden, width + hidden)
    return Module(place, layout, frame, project, norms, layer(frame, config, at), head, model.vocab, embed, width)


def repeated(heads: Heads, before: list[Module], name: str) -> bool:
    """Whether the first module has the same tensor."""
    both = [heads, before[0].frame.heads] if before else []
    return len(both) == 2 and all(each.has(name) for each in both) and torch.equal(*(each.tensor(name, (-1, -1)) for each in both))


def layer(frame: Frame, config: dict[str, Any], at: str) -> Layer:
    """Of the target's own kind."""
    return Layer(
        attention=attention(frame, config, f"{at}self_attn."),
        after_attention=None,
        before_mlp=frame.norm(f"{at}post_attention_layernorm"),
        mlp=mlp(frame, config, f"{at}mlp."),
        after_mlp=None,
        before_next=None,
    )


def attention(frame: Frame, config: dict[str, Any], at: str) -> Attends:
    if frame.heads.has(f"{at}kv_a_proj_with_mqa.weight"):
        return latent_attention(frame.heads, at, config, frame.hidden, frame.rotation, frame.eps)
    return gated_attention(frame, at) if is_gated(frame, at) else frame.attention(at, frame.hidden)


def mlp(frame: Frame, config: dict[str, Any], at: str) -> Block:
    heads = frame.heads
    if heads.has(f"{at}shared_expert_gate.weight"):
        return accompanied(frame, at)
    return routed(heads, at, config, frame.hidden, frame.activation) if heads.has(f"{at}gate.weight") else frame.mlp(at)


def tried(modules: list[Module], usual: Way, fixed: list[str], host: Host) -> Way:
    """The way that agrees best with what the target writes; says so where it is not the family's usual one."""
    if set(fixed) >= {part for part, _ in PARTS.values()} - ({"chained"} if usual.chained is None else set()):
        return usual
    spec = modules[0].layer.attention.spec
    pool = PoolSpec(len(modules), spec.kv_heads, spec.head_dim, host.backend.caps.kv_dtypes[0])
    trial = Trial(write(host), [module.embed for module in modules], modules[0].width, pool, host)

    def nets(way: Way) -> list[Net]:
        return [module.net(way) for module in modules]

    way, found = choose(usual, fixed, lambda each: trial.first(nets(each), each), lambda each: trial.second(nets(each), each))
    if way != usual:
        log.warning(
            "this MTP module agrees with the target more often as %s than as %s, which is %s usual way (%s); it is read so",
            way,
            usual,
            modules[0].layout.name,
            ", ".join(f"{each}: {share:.0%}" for each, share in found.items()),
        )
    return way
