"""Bodies that cannot be read: status and words for every kind."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.server import body, schema
from forerun.server.errors import ApiError

DECODER = msgspec.json.Decoder(schema.CompatGenerateRequest)


def refuse(text: str | bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        body.decode(text.encode() if hasattr(text, "encode") else text, DECODER)
    return caught.value


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("{}", 422, "missing field `inputs`"),
        ('{"inputs":null}', 422, "inputs: invalid type: null, expected string"),
        ('{"inputs":["a"]}', 422, "inputs: invalid type: sequence, expected string"),
        ('{"inputs":"x","parameters":null}', 422, "parameters: invalid type: null, expected map"),
        ('{"inputs":"x","stream":null}', 422, "stream: invalid type: null, expected boolean"),
        ('{"inputs":"x","parameters":{"max_new_tokens":"50"}}', 422, "parameters.max_new_tokens: invalid type: string, expected integer"),
        ('{"inputs":"x","parameters":{"max_new_tokens":20.0}}', 422, "invalid type: floating point, expected integer"),
        ('{"inputs":"x","parameters":{"max_new_tokens":true}}', 422, "invalid type: boolean, expected integer"),
        ('{"inputs":"x","parameters":{"max_new_tokens":-1}}', 422, "parameters.max_new_tokens: invalid value"),
        ('{"inputs":"x","parameters":{"max_new_tokens":4294967296}}', 422, "parameters.max_new_tokens: invalid value"),
        ('{"inputs":"x","parameters":{"top_k":2147483648}}', 422, "parameters.top_k: invalid value"),
        ('{"inputs":"x","parameters":{"seed":-1}}', 422, "parameters.seed: invalid value"),
        ('{"inputs":"x","parameters":{"do_sample":null}}', 422, "do_sample: invalid type: null, expected boolean"),
        ('{"inputs":"x","parameters":{"stop":null}}', 422, "stop: invalid type: null, expected sequence"),
        ('{"inputs":"x","parameters":{"stop":"x"}}', 422, "stop: invalid type: string, expected sequence"),
        ('{"inputs":"x","parameters":{"stop":["x",1]}}', 422, "stop[1]: invalid type: integer, expected string"),
        ("[1]", 422, "invalid type: sequence, expected map"),
        ('{"inputs":"x"', 400, "Failed to parse the request body as JSON"),
        ("", 400, "Failed to parse the request body as JSON"),
        ("nonsense", 400, "Failed to parse the request body as JSON"),
        ('{"inputs":"\\ud800"}', 400, "Failed to parse the request body as JSON"),
        (b'{"inputs":"\xff"}', 400, "Failed to parse the request body as JSON"),
    ],
)
def test_refused(text: str | bytes, status: int, words: str) -> None:
    error = refuse(text)
    assert error.status == status
    assert words in error.message
    assert error.kind == "validation"
    assert json.loads(error.body()) == {"error": error.message, "error_type": "validation"}


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    assert refuse('{"inputs":"x","other":' + "[" * 100_000).status == 400


def test_unknown_fields_nulls_and_trailing_bytes_are_accepted() -> None:
    text = b'{"inputs":"x","model":"y","parameters":{"top_k":null,"seed":null,"stop":[],"new":[1]}} and more'
    decoded = body.decode(text, DECODER)
    assert decoded.inputs == "x"
    assert decoded.parameters == schema.GenerateParameters()


def test_absent_parameters_differ_from_empty_ones() -> None:
    assert body.decode(b'{"inputs":"x"}', DECODER).parameters is msgspec.UNSET
    assert body.decode(b'{"inputs":"x","parameters":{}}', DECODER).parameters == schema.GenerateParameters()


scalars = st.sampled_from([None, True, -1, 0, 1, 2**31, 2**32, 2**64, 2**70, 0.5, 1e300, float("inf"), float("nan"), "", "cat"])
json_values = scalars | st.lists(scalars, max_size=2) | st.dictionaries(st.sampled_from(["type", "value"]), scalars, max_size=2)


@given(st.dictionaries(st.sampled_from([*schema.GenerateParameters.__struct_fields__, "unknown"]), json_values, max_size=6))
def test_any_parameters_decode_or_are_refused_in_one_shape(parameters: dict[str, object]) -> None:
    text = json.dumps({"inputs": "x", "parameters": parameters}).encode()
    try:
        body.decode(text, DECODER)
    except ApiError as error:
        assert error.status in (400, 422)
        assert set(json.loads(error.body())) == {"error", "error_type"}
