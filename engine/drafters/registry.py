"""Which drafters there are, and what `--speculator` means.

    SPEC = NAME[=VALUE][+SPEC]    `suffix`, `suffix=chain`, `ngram+suffix`, …; VALUE is the drafter's own business

A drafter is one file and one line in `DRAFTERS`; it is imported when it is chosen, so nobody pays for those that are not. Its class
has `open(value, setting) -> Drafter`, which raises StartError (with its cure) for a value that it does not understand. What happens
between that and its first verb stands in `draft.py`.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable

from forerun.backends.base import Backend
from forerun.engine.drafters.draft import Drafter, Silent
from forerun.engine.errors import StartError
from forerun.engine.models.model import Model
from forerun.messages import Start

DRAFTERS = {
    "dflash": "forerun.engine.drafters.dflash:Dflash",
    "dspark": "forerun.engine.drafters.dflash:Dflash",
    "eagle": "forerun.engine.drafters.eagle:Eagle",
    "grams": "forerun.engine.drafters.grams:Grams",
    "lookahead": "forerun.engine.drafters.lookahead:Lookahead",
    "medusa": "forerun.engine.drafters.medusa:Medusa",
    "mlp": "forerun.engine.drafters.mlp:Mlp",
    "model": "forerun.engine.drafters.model:Companion",
    "mtp": "forerun.engine.drafters.mtp:Mtp",
    "ngram": "forerun.engine.drafters.ngram:Ngram",
    "remote": "forerun.engine.drafters.remote:Remote",
    "suffix": "forerun.engine.drafters.suffix:Suffix",
}
NATIVE = {(DRAFTERS["suffix"],), (DRAFTERS["suffix"], DRAFTERS["grams"])}
"""what `lookups.py` does in one call, if it is these"""
AUTO = "suffix"
"""what `auto` is for a model that brings no drafter of its own"""


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """The worker around a drafter with weights. `start`: what the front asked for. `model`: the target, whose embedding and head may be
    shared. `progress(stage, done, total)`: call it often while loading."""

    start: Start
    backend: Backend
    model: Model
    progress: Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What a drafter may want to know when it is opened. `nodes`: most guesses of a row, 0 = the drafter chooses. `tree`: the target can
    verify siblings. `host`: None where there is no worker, which look-ups do not mind. `native`: look-ups may be those in C++."""

    nodes: int = 0
    tree: bool = True
    host: Host | None = None
    native: bool = True

    @property
    def worker(self) -> Host:
        """StartError for a drafter that cannot do without."""
        if self.host is None:
            raise StartError("a drafter with weights needs a worker with a target model", "use ngram or suffix where there is none")
        return self.host


def open_drafter(spec: str, setting: Setting) -> Drafter:
    """StartError (with its cure) for a name that is not registered, or for several drafters that cannot be joined."""
    if spec == "none":
        return Silent()
    parts = re.split(rf"\+(?=(?:{'|'.join(DRAFTERS)})(?:[=+]|$))", AUTO if spec == "auto" else spec)
    named = [part.partition("=") for part in parts]
    if setting.native and tuple(DRAFTERS.get(name) for name, _, _ in named) in NATIVE:
        lookups = importlib.import_module("forerun.engine.drafters.lookups")
        native: Drafter | None = lookups.Lookups.open([value for _, _, value in named], setting)
        if native is not None:
            return native
    if len(parts) == 1:
        return _open(parts[0], setting)
    dag = importlib.import_module("forerun.engine.drafters.dag")
    joined: Drafter = dag.Dag.join([_open(part, setting) for part in parts], setting, parts)
    return joined


def _open(spec: str, setting: Setting) -> Drafter:
    name, _, value = spec.partition("=")
    if name not in DRAFTERS:
        raise StartError(f"there is no speculator {name!r}", f"use one of: auto, none, {', '.join(sorted(DRAFTERS))}")
    module, _, kind = DRAFTERS[name].partition(":")
    drafter: Drafter = getattr(importlib.import_module(module), kind).open(value, setting)
    return drafter
