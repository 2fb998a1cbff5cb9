"""EAGLE-1, -2 and -3: `--speculator eagle=DIR` (2401.15077, 2406.16858, 2503.01840).

EAGLE-1 and EAGLE-2 are one network (the second drafts trees); EAGLE-3 reads several layers of the target and has a vocabulary of its own.
Which it is, is read from the names of the tensors. Layouts that load as they are:

    SafeAILab EAGLE-1, -2     fc [d, 2d], layers.0.* without an input norm; output head (and embedding, if absent) of the target
    SafeAILab EAGLE-3         fc [d, n·d], midlayer.*, norm, lm_head, d2t, t2d
    speculators eagle3        the same under layers.0.*, settings in config.json, those of the layer in `transformer_layer_config`
    speculators peagle        the same with `mask_hidden`: several places in one forward (`parallel.py`)
    DeepSpec eagle3           five layers (`target_layer_ids`), full vocabulary, own embedding, norms of q and k

The features are those in front of the layers that `eagle_aux_hidden_state_layer_ids` names (default 2, L/2, L − 3), or behind those that
`target_layer_ids` names.

    eagle=DIR,beams=N         nodes that each level of a draft goes on from (EAGLE-2's trees); default: one for every six guesses
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from forerun.engine.drafters.entries import Made
from forerun.engine.drafters.heads import Heads, parse_value
from forerun.engine.drafters.lattice import Levels
from forerun.engine.drafters.parallel import Mask, Parallel
from forerun.engine.drafters.recursive import Recursive
from forerun.engine.drafters.recursive_load import Frame, embedding, pool_of, targets
from forerun.engine.drafters.recursive_net import Fusion, Joined, Net, Split
from forerun.engine.drafters.registry import Host, Setting
from forerun.engine.models.decoder import Layer, Linear

log = logging.getLogger(__name__)

MOST = 8
"""guesses for a row, unless told otherwise"""
BEAMS = 10
"""as many as EAGLE-2 goes on from"""
NODES_A_BEAM = 6
OPTIONS = {"beams": [str(count) for count in range(1, 33)]}


class Eagle:
    """Opens the drafter; what runs is `Recursive`, or `Parallel` for P-EAGLE."""

    @staticmethod
    def open(value: str, setting: Setting) -> Recursive | Parallel:
        host = setting.worker
        place, options = parse_value("eagle", value, OPTIONS)
        heads = Heads.open(place, host)
        found = read(heads, host)
        heads.close()
        log.info("%s: %s", heads.path, found.told)
        if found.mask is not None:
            most = setting.nodes or found.places or MOST
            levels = Levels.open(host, setting.tree, free=True, targets=found.targets)
            return Parallel(found.made, found.mask, levels, host, most, min(most, found.places or MOST))
        levels = Levels.open(host, setting.tree, targets=found.targets)
        return Recursive(found.made, levels, host, setting.nodes or MOST, beams(options.get("beams"), setting))


def beams(asked: str | None, setting: Setting) -> int:
    """Chains where siblings cannot be verified, or few guesses are made: a tree computes its opened nodes again at each level."""
    if not setting.tree:
        return 1
    return int(asked) if asked else max(1, min(BEAMS, (setting.nodes or MOST) // NODES_A_BEAM))


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """`targets`: the target's id of each draft id, None = the same. `told`: what was found, for the log. `mask`: of a head that guesses
    several places at once (P-EAGLE); `places`: how many, 0 = the file does not say."""

    made: Made
    targets: Any
    told: str
    mask: Mask | None = None
    places: int = 0


def read(heads: Heads, host: Host) -> Found:
    """Either network, by the names of its tensors."""
    config = heads.config | (heads.config.get("transformer_layer_config") or {})
    described = all(config.get(name) for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    heads.demand(described, "config.json does not describe a decoder layer", "fetch config.json of these heads again")
    third = any(heads.has(f"{at}hidden_norm.weight") for at in ("midlayer.", "layers.0."))
    return read_third(heads, config, host) if third else read_first(heads, config, host)


def read_first(heads: Heads, config: dict[str, Any], host: Host) -> Found:
    """EAGLE-1 and -2: features behind the final norm, the target's output head, no norm of its own."""
    model, hidden = host.model, config["hidden_size"]
    heads.demand(hidden == model.hidden, f"its features are {hidden} wide, the target's are {model.hidden}: it was made for another target")
    frame, shared = Frame(heads, config, host), model.shared()
    embed, width = embedding(heads, host, "embed_tokens.weight", model.vocab)
    entry = Joined(heads.linear("fc", hidden, width + hidden), None, None, None, False, frame.eps)
    layers = stack(frame, "layers.{}.", hidden)
    net = Net(Fusion([], None, None, frame.eps), entry, layers, None, False, shared.logits, model.vocab, hidden, frame.eps)
    made = Made(net, (model.layers,), embed, width, pool_of(heads, layers), heads.bytes)
    return Found(made, None, "EAGLE-1/2 in SafeAILab's layout")


def read_third(heads: Heads, config: dict[str, Any], host: Host) -> Found:
    """EAGLE-3. More than one layer: the others are ordinary ones."""
    model, hidden, nested = host.model, config["hidden_size"], heads.config.get("eagle_config") or {}
    settings = nested | heads.config
    at = "midlayer." if heads.has("midlayer.hidden_norm.weight") else "layers.0."
    taps, fed = tapped(heads, settings, model.layers), settings.get("target_hidden_size") or model.hidden
    heads.demand(fed == model.hidden, f"its features are {fed} wide, the target's are {model.hidden}: it was made for another target")
    inputs = heads.checkpoint.shape(f"{heads.prefix}fc.weight")[1] if heads.has("fc.weight") else hidden
    heads.demand(
        inputs == len(taps) * model.hidden,
        f"it reads {inputs} values, {len(taps)} layers of the target have {len(taps) * model.hidden}: it was made for another target",
    )
    frame = Frame(heads, config, host)
    embed, width = embedding(heads, host, "embed_tokens.weight", model.vocab)
    fusion = Fusion(
        [frame.norm(f"fc_norm.{i}", model.hidden) for i in range(len(taps))] if settings.get("fc_norm") else [],
        frame.norm("input_norm", len(taps) * model.hidden) if settings.get("norm_before_fc") else None,
        heads.linear("fc", hidden, len(taps) * model.hidden) if heads.has("fc.weight") else None,
        frame.eps,
    )
    residual = bool(settings.get("norm_before_residual", False))
    entry = Split(frame.norm(f"{at}input_layernorm", width), frame.norm(f"{at}hidden_norm"), residual, frame.eps)
    layers = stack(frame, at if at == "midlayer." else "layers.{}.", width + hidden)
    head, vocab = own_head(heads, host, hidden)
    carries = bool(settings.get("norm_output", False))
    net = Net(fusion, entry, layers, frame.norm("norm"), carries, head, vocab, hidden, frame.eps)
    made = Made(net, taps, embed, width, pool_of(heads, layers), heads.bytes)
    layout = (
        "speculators'" if "speculators_model_type" in heads.config else "DeepSpec's" if "target_layer_ids" in settings else "SafeAILab's"
    )
    mask = read_mask(heads, settings, host, fusion, hidden)
    said = (
        f"{'EAGLE-3' if mask is None else 'P-EAGLE'} in {layout} layout, features behind layers {', '.join(map(str, taps))}, {vocab} tokens"
    )
    return Found(made, targets(heads, vocab, model.vocab), said, mask, speculative_tokens(heads.config))


def read_mask(heads: Heads, settings: dict[str, Any], host: Host, fusion: Fusion, hidden: int) -> Mask | None:
    """P-EAGLE's learned feature, of whatever shape with so many values, fused like others where it is one of the target's."""
    asked = heads.config.get("speculators_model_type") == "peagle"
    if not heads.has("mask_hidden"):
        heads.demand(not asked, "it has no tensor mask_hidden, so its guesses cannot be made in parallel", "fetch the heads again")
        return None
    token, table = settings.get("mask_token_id"), host.model.shared().table.shape[0]
    heads.demand(
        token is not None and 0 <= token < table,
        f"its mask_token_id {token} is no token of the target",
        "fetch config.json of these heads again",
    )
    shape = heads.checkpoint.shape(f"{heads.prefix}mask_hidden")
    row = heads.keep(heads.tensor("mask_hidden", tuple(shape)).float()).reshape(1, -1)
    if row.shape[1] != hidden or fusion.project is None:
        fed = len(tapped(heads, settings, host.model.layers)) * host.model.hidden
        heads.demand(row.shape[1] == fed, f"its mask_hidden has {row.shape[1]} values, a row has {hidden}, the target's layers {fed}")
        row = fusion(host.backend.ops, row)
    return Mask(int(token or 0), row)


def speculative_tokens(config: dict[str, Any]) -> int:
    """How many guesses the head was made for, by speculators' configuration; 0 = it does not say."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return int(methods[0].get("speculative_tokens") or 0)


def tapped(heads: Heads, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
    """The taps that its features come from."""
    if "target_layer_ids" in settings:
        taps = tuple(settings["target_layer_ids"])
    else:
        ids = settings.get("eagle_aux_hidden_state_layer_ids") or (2, layers // 2, layers - 3)
        taps = tuple(each - 1 for each in ids)
    heads.demand(
        all(-1 <= tap < layers for tap in taps), f"it reads layers {taps} of a target that has {layers}: it was made for another target"
    )
    return taps


def stack(frame: Frame, at: str, width: int) -> list[Layer]:
    """All layers; the first reads `width` values, through its entry."""
    count = int(frame.config.get("num_hidden_layers") or 1)
    between = [frame.norm(f"{at.format(i)}input_layernorm") for i in range(1, count)]
    return [frame.layer(at.format(i), frame.hidden if i else width, [*between, None][i]) for i in range(count)]


def own_head(heads: Heads, host: Host, hidden: int) -> tuple[Any, int]:
    """The output head and its vocabulary; the target's where the file has none."""
    if not heads.has("lm_head.weight"):
        return host.model.shared().logits, host.model.vocab
    vocab = heads.checkpoint.shape(f"{heads.prefix}lm_head.weight")[0]
    heads.demand(
        heads.has("d2t") or vocab == host.model.vocab,
        f"its output head has {vocab} tokens and no d2t that says which of the target's {host.model.vocab} they are",
        "use heads that were trained for this target",
    )
    return Linear(heads.weight("lm_head.weight", vocab, hidden), None), vocab
