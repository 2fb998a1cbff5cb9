"""Multi-token-prediction modules: `--speculator mtp` (in the target's own files) or `mtp=DIR` (2412.19437).

    x = W [norm(embedding of token p + 1) ; norm(h_p)]  ─▶ one decoder layer ─▶ norm ─▶ output head: token p + 2

Families store it under other names, and differ in what their files do not say (`mtp_trial.py`):

    layout      names                                               usual way
    DeepSeek    model.layers.L.{enorm, hnorm, eh_proj, …}           [e; h], features behind the final norm, carries its raw result
    GLM         the same, and its config says glm                   [e; h], behind, carries the normed result
    MiMo        model.mtp_layers.0.{token_layernorm, input_proj, …} [h; e], behind, normed
    Qwen        mtp.{fc, norm, pre_fc_norm_*}, mtp.layers.0.*       [e; h], behind, normed; norms are stored as w − 1

    mtp=DIR,first=pre|post,order=eh|he,carry=raw|normed             settles what is otherwise tried at start, on what the target writes

Of several modules the first is used, over and over. A layer is a Llama's or Qwen's (biases, norms of heads), or has DeepSeek's latent
attention or its mixture (`mtp_blocks.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

from forerun.engine.drafters.eagle import beams
from forerun.engine.drafters.heads import Heads, parse_value
from forerun.engine.drafters.lattice import Levels
from forerun.engine.drafters.mtp_blocks import latent_attention, routed
from forerun.engine.drafters.mtp_trial import Way, agreement, choose, write
from forerun.engine.drafters.recursive import Made, Recursive
from forerun.engine.drafters.recursive_load import Embed, Frame, embedding, pool_of
from forerun.engine.drafters.recursive_net import Fusion, Joined, Net
from forerun.engine.drafters.registry import Host, Setting
from forerun.engine.errors import StartError
from forerun.engine.models.decoder import Layer, Linear

log = logging.getLogger(__name__)

USUAL = Way()
MOST = 3
"""guesses for a row, unless told otherwise: one module that is used again and again gets worse quickly"""
OPTIONS = {"first": ("pre", "post"), "order": ("eh", "he"), "carry": ("raw", "normed")}
PARTS = {"first": ("pre", "pre"), "order": ("hidden_first", "he"), "carry": ("normed", "normed")}
"""option → the part of a `Way` and the value that sets it"""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Names behind the prefix. `layer`: what stands before the layer's own; `offset`: of norm weights; `way`: the family's usual one."""

    name: str
    project: str
    embed_norm: str
    hidden_norm: str
    norm: str
    head: str
    layer: str = ""
    offset: float = 0.0
    way: Way = USUAL


DEEPSEEK = Layout("DeepSeek's", "eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head")
GLM = dataclasses.replace(DEEPSEEK, name="GLM's", way=Way(normed=True))
MIMO = Layout("MiMo's", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", "", way=Way(hidden_first=True, normed=True))
QWEN = Layout("Qwen's", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "", "layers.0.", 1.0, Way(normed=True))
FOUND = (
    (re.compile(r"(.*layers\.(\d+)\.)eh_proj\.weight"), DEEPSEEK),
    (re.compile(r"(.*mtp_layers\.(\d+)\.)input_proj\.weight"), MIMO),
    (re.compile(r"(.*mtp()\.)fc\.weight"), QWEN),
)


class Mtp:
    """Opens the drafter; what runs is `Recursive`."""

    @staticmethod
    def open(value: str, setting: Setting) -> Recursive:
        host = setting.worker
        place, options = parse_value("mtp", value, OPTIONS, host.start.model_id)
        heads = Heads.open(place, host)
        layout, modules = find_layout(heads)
        usual = layout.way
        for option, asked in options.items():
            part, set_by = PARTS[option]
            usual = dataclasses.replace(usual, **{part: asked == set_by})
        module = read(heads, layout, host)
        heads.close()
        way = tried(module, usual, [PARTS[option][0] for option in options], host)
        more = f", of which the first is used, there are {modules}" if modules > 1 else ""
        log.info("%s: an MTP module in %s layout, %s%s", heads.path, layout.name, way, more)
        made = Made(module.net(way), (host.model.layers - way.pre,), module.embed, module.width, pool_of(heads, module.layers), heads.bytes)
        return Recursive(made, Levels.open(host, setting.tree), host, setting.nodes or MOST, beams(None, setting))


def find_layout(heads: Heads) -> tuple[Layout, int]:
    """Sets the prefix; the layout and how many modules there are. StartError where there is none."""
    names = sorted(heads.checkpoint.names())
    for pattern, layout in FOUND:
        found = [match for name in names if (match := pattern.fullmatch(name))]
        if found:
            first = min(found, key=lambda match: int(match[2] or 0))
            heads.prefix = first[1]
            glm = any("glm" in str(name).lower() for name in (heads.config.get("model_type"), *(heads.config.get("architectures") or [])))
            return GLM if layout is DEEPSEEK and glm else layout, len(found)
    told = heads.config.get("num_nextn_predict_layers") or heads.config.get("mtp_num_hidden_layers")
    problem = "config.json names MTP modules, but their tensors are not there" if told else "there is no MTP module"
    raise StartError(
        f"{heads.path}: {problem}",
        "use a copy of this model that kept its MTP tensors (conversions often drop them), or mtp=DIR, or --speculator suffix",
    )


@dataclasses.dataclass(eq=False, slots=True)
class Module:
    """What was loaded, before it is known how it is read."""

    layout: Layout
    frame: Frame
    project: Linear
    norms: tuple[Any, Any, Any, Any]
    """of the embedding, of the features, in front of attention, in front of the head"""
    layers: list[Layer]
    head: Any
    vocab: int
    embed: Embed
    width: int

    def net(self, way: Way) -> Net:
        eps = self.frame.eps
        entry = Joined(self.project, *self.norms[:3], way.hidden_first, eps)
        fusion = Fusion([], None, None, eps)
        return Net(fusion, entry, self.layers, self.norms[3], way.normed, self.head, self.vocab, self.frame.hidden, eps)


def read(heads: Heads, layout: Layout, host: Host) -> Module:
    model = host.model
    config = heads.config | (heads.config.get("text_config") or {})
    heads.demand(bool(config.get("hidden_size") and config.get("num_attention_heads")), "config.json does not describe a decoder layer")
    hidden = config["hidden_size"]
    heads.demand(hidden == model.hidden, f"its features are {hidden} wide, the target's are {model.hidden}: it was made for another target")
    frame = Frame(heads, config, host, layout.offset)
    embed, width = embedding(heads, host, "embed_tokens.weight", model.vocab)
    at = layout.layer
    norms = (
        frame.norm(layout.embed_norm, width),
        frame.norm(layout.hidden_norm),
        frame.norm(f"{at}input_layernorm"),
        frame.norm(layout.norm),
    )
    own = bool(layout.head) and heads.has(f"{layout.head}.weight")
    head = Linear(heads.weight(f"{layout.head}.weight", model.vocab, hidden), None) if own else model.shared().logits
    project = heads.linear(layout.project, hidden, width + hidden)
    return Module(layout, frame, project, norms, [layer(frame, config, at)], head, model.vocab, embed, width)


def layer(frame: Frame, config: dict[str, Any], at: str) -> Layer:
    """Of the target's own kind."""
    heads = frame.heads
    latent, mixture = heads.has(f"{at}self_attn.kv_a_proj_with_mqa.weight"), heads.has(f"{at}mlp.gate.weight")
    return Layer(
        attention=latent_attention(heads, f"{at}self_attn.", config, frame.hidden, frame.rotation, frame.eps)
        if latent
        else frame.attention(f"{at}self_attn.", frame.hidden),
        after_attention=None,
        before_mlp=frame.norm(f"{at}post_attention_layernorm"),
        mlp=routed(heads, f"{at}mlp.", config, frame.hidden, frame.activation) if mixture else frame.mlp(f"{at}mlp."),
        after_mlp=None,
        before_next=None,
    )


def tried(module: Module, usual: Way, fixed: list[str], host: Host) -> Way:
    """The way that agrees best with what the target writes; says so where it is not the family's usual one."""
    if len(fixed) == len(PARTS):
        return usual
    written = write(host)
    way, found = choose(usual, fixed, lambda each: agreement(written, module.net(each), each, module.embed, module.width, host))
    if way != usual:
        log.warning(
            "this MTP module agrees with the target more often as %s than as %s, which is %s usual way (%s); it is read so",
            way,
            usual,
            module.layout.name,
            ", ".join(f"{each}: {share:.0%}" for each, share in found.items()),
        )
    return way
