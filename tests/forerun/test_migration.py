"""docs/migrate-from-tgi.md leaves no flag of TGI out, and its files are YAML."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from forerun.config import Config

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "migrate-from-tgi.md").read_text(encoding="utf-8")
FLAGS = (Path(__file__).resolve().parents[2] / "docs" / "flags.md").read_text(encoding="utf-8")


def test_every_flag_of_tgi_is_told_of() -> None:
    rows = [line for line in FLAGS.splitlines() if line.startswith("| `--") and "` * |" not in line]
    named = {name for row in rows for name in re.findall(r"`(--[a-z-]+)`", row.split(" | ")[0])} - {
        "--log-level",
        "--log-json",
        "--hf-hub-offline",
    }
    assert len(named) > 50 and "--prefix-caching" in named
    missing = {name for name in named - {"--prefix-caching"} if f"`{name}`" not in PAGE}
    assert not missing


def test_every_flag_it_names_is_one() -> None:
    table = PAGE.partition("## Flag by flag")[2]
    assert all(f"`{name}`" in FLAGS for name in re.findall(r"`(--[a-z-]+)`", table))


def test_its_files_are_yaml_and_what_is_started_is_understood() -> None:
    blocks = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)]
    assert len(blocks) == 4
    for block in blocks:
        service = block["services"]["tgi"] if "services" in block else block
        config = Config.parse(service.get("command") or service["args"], {})
        assert config.model.model_id
