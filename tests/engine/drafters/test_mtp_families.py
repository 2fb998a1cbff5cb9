"""What each family of MTP modules does where nothing says otherwise: norms, order, and what it carries on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.engine.drafters.heads import Heads
from forerun.engine.drafters.mtp import find_layout
from forerun.engine.drafters.mtp_trial import Way
from forerun.engine.drafters.registry import Setting, open_drafter
from tests.engine.drafters.nets import around, write_mtp


@pytest.mark.parametrize(
    "family, says, name, way",
    [
        ("deepseek", {"model_type": "deepseek_v3"}, "DeepSeek's", Way()),
        ("deepseek", {"model_type": "glm4_moe"}, "GLM's", Way(normed=True)),
        ("deepseek", {"model_type": "x", "architectures": ["Glm4MoeForCausalLM"]}, "GLM's", Way(normed=True)),
        ("mimo", {}, "MiMo's", Way(hidden_first=True, normed=True)),
        ("qwen", {"model_type": "qwen3_next"}, "Qwen's", Way(normed=True)),
    ],
)
def test_every_family_has_its_usual_way(family: str, says: dict[str, object], name: str, way: Way, tmp_path: Path) -> None:
    """Told by names and by what the configuration calls itself; options settle the rest without a trial, each for itself."""
    folder = write_mtp(tmp_path, family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | says))
    layout, _ = find_layout(Heads.open(str(folder), around()))
    assert (layout.name, layout.way) == (name, way)
    opened = open_drafter(f"mtp={folder},first=pre,order={'he' if way.hidden_first else 'eh'},carry=normed", Setting(3, True, around()))
    assert opened.needs.layers == (1,)
