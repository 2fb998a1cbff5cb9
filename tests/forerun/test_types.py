"""Flags that say in which types weights and KV are kept, from the command line to what a worker is told."""

from __future__ import annotations

import pytest

from forerun.config import Config
from forerun.launch import start_message
from forerun.options import ConfigError


def parse(*argv: str) -> Config:
    return Config.parse(["--model-id", "m", *argv], {})


@pytest.mark.parametrize("name", ["int8", "bfloat16", "float32"])
def test_a_type_of_the_cache_reaches_the_worker(name: str) -> None:
    config = parse("--kv-cache-dtype", name)
    assert start_message(config).kv_dtype == name and not config.notes
    assert start_message(parse()).kv_dtype is None


@pytest.mark.parametrize("name", ["fp8_e4m3fn", "fp8_e5m2"])
def test_the_names_of_tgi_are_served_as_int8_and_said_so(name: str) -> None:
    config = parse("--kv-cache-dtype", name)
    assert start_message(config).kv_dtype == "int8"
    (note,) = config.notes
    assert name in note and "int8" in note


def test_other_types_are_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="choose one of bfloat16, float32, int8, fp8_e4m3fn, fp8_e5m2"):
        parse("--kv-cache-dtype", "int4")


@pytest.mark.parametrize("name", ["int8", "int4", "eetq", "bitsandbytes", "gptq", "awq"])
def test_quantize_reaches_the_worker(name: str) -> None:
    assert start_message(parse("--quantize", name)).quantize == name
