"""The identity of answers once more on the real model, where sums are long and logits are close. Needs `make model`."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.backends.registry import open_backend
from forerun.engine.build import assemble
from forerun.engine.drafters.draft import Drafter, Silent
from forerun.engine.drafters.registry import Host, Setting, open_drafter
from forerun.engine.models.load import load_model
from forerun.messages import Start
from tests.engine.test_identity import KINDS, Script, halfway, perfect, spread
from tests.engine.tiny import Front, Sequence_, params_for

MODEL = Path(__file__).parents[2] / "models/smollm2-135m-instruct"
SPECS = ["ngram", "suffix", "ngram+suffix", f"model={MODEL}", f"suffix+model={MODEL}"]
PROMPTS = [[504, 3575, 282, 4649, 314], list(range(1000, 1040)), [216, 34, 216] * 30, [1, 2, 3]]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not MODEL.is_dir(), reason="run `make model` first")]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("dtype", "quantize", "kv"),
    [
        ("bfloat16", None, None),
        ("float32", None, None),
        ("bfloat16", "int8", None),
        ("bfloat16", "int4", None),
        ("bfloat16", None, "int8"),
        ("bfloat16", "int4", "int8"),
    ],
)
def test_the_demo_model_answers_alike(dtype: str, quantize: str | None, kv: str | None) -> None:
    backend = open_backend("cpu", 1)
    sizes = {"max_rows": 4, "max_pool_tokens": 2048, "max_total_tokens": 512, "max_step_tokens": 128}
    start = Start(str(MODEL), dtype=dtype, quantize=quantize, kv_dtype=kv, **sizes)
    model = load_model(start, backend, lambda *progress: None)
    host = Host(start, backend, model, lambda *progress: None)

    def front_of(drafter: Drafter) -> Front:
        return Front(assemble(start, backend, model, drafter, lambda *progress: None))

    def requests(kinds: list[str]) -> list[Sequence_]:
        return [Sequence_(p, params_for(p, max_new_tokens=16, **KINDS[kind])) for p, kind in zip(PROMPTS, kinds)]

    names = list(KINDS)
    for kinds in (names[:4], names[4:8], names[-2:]):
        plain = requests(kinds)
        for sequence in plain:
            front = front_of(Silent())
            front.admit(sequence)
            front.run()
        for drafter, chunk, guess in (
            (Silent(), 3, 0),
            (Silent(), 512, 0),
            *((Script(plain, make), 7, 6) for make in (perfect, spread, halfway)),
            *((open_drafter(spec, Setting(8, True, host)), 64, 8) for spec in SPECS),
        ):
            front = front_of(drafter)
            together = requests(kinds)
            for sequence in together:
                front.admit(sequence)
            while any(s.computed + 1 < len(s.prompt) for s in front.running):
                front.step(dict.fromkeys(range(len(together)), chunk))
            front.run(guess=guess)
            assert [s.answer for s in together] == [s.answer for s in plain]
