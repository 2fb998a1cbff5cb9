"""Which drafter a folder of weights is for, told from its configuration and the names of its tensors, and where to look for one.

`--speculator auto` looks into the model's own folder (Medusa-2 and MTP modules live among the target's tensors), then at the folders in it,
then at folders beside it that are called like it (`MODEL-eagle3`, `MODEL.medusa`). Reads no values: what is found may still be refused
when it is opened. An ordinary model is never taken for a drafter of another one.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forerun.engine.errors import StartError
from forerun.engine.weights import read_config

log = logging.getLogger(__name__)

BEST_FIRST = ("dspark", "dflash", "eagle", "mtp", "medusa", "mlp")
TABLES = ("grams",)
"""what computes nothing"""
SPECULATORS = {"eagle3": "eagle", "peagle": "eagle", "dflash": "dflash", "dspark": "dspark", "mtp": "mtp", "mlp": "mlp", "medusa": "medusa"}
"""`speculators_model_type` → drafter"""
WITHIN = re.compile(r"(^|\.)(mtp|mtp_layers\.\d+)\.|\.eh_proj\.weight$")
"""names of MTP modules"""
MOST_HEADER = 1 << 28
"""bytes of a plausible safetensors header"""


def find_heads(folder: Path) -> list[str]:
    """The best drafter in or beside a model's folder, as `--speculator` would have it (`eagle=DIR`). A table of n-grams takes no time of
    the device, so it comes before whatever else there is."""
    if not folder.is_dir():
        return []
    inside, near = folders_in(folder), folders_in(folder.parent)
    beside = [each for each in near if each != folder and each.name.startswith((f"{folder.name}-", f"{folder.name}."))]
    found: dict[str, Path] = {}
    for place in (folder, *inside, *beside):
        kind = kind_of(place)
        if kind is not None:
            found.setdefault(kind, place)
    best = next(([kind] for kind in BEST_FIRST if kind in found), [])
    return [f"{kind}={found[kind]}" for kind in (*TABLES, *best) if kind in found]


def folders_in(place: Path) -> list[Path]:
    """By name; none where nobody may look."""
    try:
        return sorted(each for each in place.iterdir() if each.is_dir())
    except OSError:
        return []


def kind_of(folder: Path) -> str | None:
    """The drafter whose weights these are, or that they hold; None for anything else, an ordinary model included."""
    try:
        return told_by(read_config(folder) or {}, names_in(folder))
    except (StartError, OSError, ValueError, TypeError, AttributeError, pickle.UnpicklingError) as error:
        log.warning("%s cannot be read, so --speculator auto takes it for no drafter: %s", folder, error)
        return None  # files that are not what their names say


def told_by(config: dict[str, Any], names: Iterable[str]) -> str | None:
    """The first that fits, in an order in which none is taken for another."""
    names = set(names)
    classes = " ".join(map(str, config.get("architectures") or []))
    if config.get("model_type") == "grams":
        return "grams"
    said = config.get("speculators_model_type")
    if said is not None:
        return SPECULATORS.get(str(said))
    if config.get("markov_rank") or any(name.startswith("markov_head.") for name in names):
        return "dspark"
    if "dflash_config" in config or "DFlash" in classes or "DSpark" in classes:
        return "dflash"
    fused = "fc.weight" in names
    if any(name.startswith("midlayer.") for name in names) or "layers.0.hidden_norm.weight" in names:
        return "eagle"
    if fused and "layers.0.self_attn.q_proj.weight" in names and "layers.0.input_layernorm.weight" not in names:
        return "eagle"
    if any(re.match(r"(medusa_head\.)?\d+\.0\.linear\.weight$", name) for name in names):
        return "medusa"
    if "n_predict" in config or any(name.startswith("speculator.") for name in names):
        return "mlp"
    return "mtp" if any(WITHIN.search(name) for name in names) else None


def names_in(folder: Path) -> set[str]:
    """Names of all tensors of a folder's safetensors. Of pickles only indices are read; a `medusa_lm_head.pt` says enough by its name."""
    names: set[str] = set()
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / index).is_file():
            names |= set(json.loads((folder / index).read_text()).get("weight_map", {}))
    for file in sorted(folder.glob("*.safetensors")):
        names |= header(file)
    if (folder / "medusa_lm_head.pt").is_file():
        names.add("0.0.linear.weight")
    return names


def header(file: Path) -> set[str]:
    """Names in a safetensors file. ValueError for what is none."""
    with file.open("rb") as stream:
        length = struct.unpack("<Q", stream.read(8).ljust(8, b"\0"))[0]
        if length > MOST_HEADER:
            raise ValueError(f"{file} is no safetensors file")
        return set(json.loads(stream.read(length))) - {"__metadata__"}
