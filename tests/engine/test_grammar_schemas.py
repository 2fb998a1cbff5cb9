"""Random schemas: whatever a model says under one, sampled or greedy, with guesses and without, parses and is valid."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.server.grammar_check import Asked, translate
from tests.engine.test_grammar import Chain
from tests.engine.tiny import STOP, Front, Sequence_, params_for, text_of, tiny_engine

PROMPT = [5, 60, 7, 7, 31]
NAMES = ("a", "bc", "x y")

leaves: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.tuples(st.integers(-120, 120), st.integers(0, 300)).map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}, {"const": [1, "a"]}]),
    st.lists(st.sampled_from([1, "two", None, True, {"k": 2}]), min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.integers(0, 3).map(lambda most: {"type": "string", "maxLength": most}),
    st.sampled_from(["[a-c]{2}", "x|yz", "0[1-9]"]).map(lambda pattern: {"type": "string", "pattern": f"^({pattern})$"}),
)


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [name for name in required if name in properties]}


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(st.sampled_from(NAMES), inner, max_size=2), st.lists(st.sampled_from(NAMES), unique=True)),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)),
        st.lists(inner, min_size=1, max_size=2).map(lambda either: {"anyOf": either}),
    ),
    max_leaves=4,
)


@settings(max_examples=25, deadline=None)
@given(st.lists(schemas, min_size=2, max_size=4), st.integers(0, 2**31), st.sampled_from([0, 4]))
def test_what_is_said_is_valid(found: list[dict[str, Any]], seed: int, guess: int) -> None:
    front = Front(tiny_engine(Chain()))
    rows: list[tuple[dict[str, Any], Sequence_]] = []
    for place, schema in enumerate(found):
        made = translate(Asked("schema", json.dumps(schema)))
        params = params_for(
            PROMPT, grammar=made, stop_ids=(STOP,), max_new_tokens=150, sample=place % 2 == 0, seed=seed + place, temperature=2.0
        )
        rows.append((schema, Sequence_(PROMPT, params)))
        front.admit(rows[-1][1])
    front.run(guess=guess)
    for schema, row in rows:
        assert not row.error
        if row.finish == "eos_token":
            jsonschema.validate(json.loads(text_of(row.tokens[:-1])), schema)
        else:
            assert len(row.tokens) == 150
