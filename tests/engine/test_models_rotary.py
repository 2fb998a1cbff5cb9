"""Every rotary scaling against transformers' own frequencies, and the rule that length is settled at the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from forerun.engine.errors import StartError
from forerun.engine.models.rotary import SCALINGS, make_rope, tables

POSITIONS, HEAD_DIM = 256, 32
LONG = [1.0 + 0.5 * i for i in range(HEAD_DIM // 2)]
SHORT = [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)]
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, all options": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 24,
        "beta_slow": 2,
        "mscale": 0.8,
        "mscale_all_dim": 0.6,
        "truncate": False,
    },
    "yarn, attention factor": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 64, "long_factor": LONG, "short_factor": SHORT},
    "longrope, no factor": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "long_factor": LONG,
        "short_factor": SHORT,
    },
    "proportional": {"partial_rotary_factor": 0.5, "factor": 2.0},
}


def reference(parameters: dict[str, Any], length: int) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_theta": 5000.0} | parameters,
    )
    if parameters["rope_type"] == "default":
        return 1.0 / 5000.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM), 1.0
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, None, seq_len=length)


@pytest.mark.parametrize("limit", [48, POSITIONS, 400])
@pytest.mark.parametrize("name", CASES)
def test_scaling_equals_transformers(name: str, limit: int) -> None:
    parameters = {"rope_type": name.partition(",")[0]} | CASES[name]
    rope = make_rope(parameters, 5000.0, HEAD_DIM, POSITIONS, None)
    cos, sin = tables(rope, limit, 96)
    inverse, attention = reference(parameters, limit)
    angles = torch.arange(96).float()[:, None] * inverse
    torch.testing.assert_close(cos, angles.cos() * attention, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(sin, angles.sin() * attention, rtol=1e-5, atol=2e-5)


def test_every_scaling_is_tried() -> None:
    assert {name.partition(",")[0] for name in CASES} | {"su"} == set(SCALINGS)


def test_older_spellings() -> None:
    old = make_rope({"type": "linear", "factor": 2.0}, 1e4, 32, 100, None)
    new = make_rope({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, 500.0, 32, 100, None)
    assert (old.kind, old.theta, old.reach) == (new.kind, new.theta, new.reach) == ("linear", 1e4, 200)


def test_partial_rotation_has_fewer_columns() -> None:
    rope = make_rope({"partial_rotary_factor": 0.25}, 1e4, 32, 100, None)
    cos, _ = tables(rope, 100, 10)
    assert cos.shape == (10, 4)
    torch.testing.assert_close(cos[3, 1], torch.tensor(3.0 * 1e4**-0.25).cos())


def test_a_position_turns_alike_whatever_is_read_of_the_table() -> None:
    rope = make_rope({"rope_type": "dynamic", "factor": 2.0}, 1e4, 32, 100, None)
    few, many = tables(rope, 150, 20)[0], tables(rope, 150, 150)[0]
    assert torch.equal(few, many[:20])


def test_unknown_scaling_names_the_known_ones() -> None:
    with pytest.raises(StartError, match="rope scaling axial is not known; known are default, linear"):
        make_rope({"rope_type": "axial"}, 1e4, 32, 100, None)


def test_longrope_of_another_head_size_is_an_error() -> None:
    rope = make_rope({"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}, 1e4, 32, 100, None)
    with pytest.raises(StartError, match="1 factors for 16 pairs"):
        tables(rope, 100, 10)
