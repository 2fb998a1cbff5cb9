"""The target's two ends, as drafters share them: the same embedding and the same logits as the model's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.backends.base import Backend
from forerun.backends.registry import open_backend
from forerun.engine import testmodel
from forerun.engine.errors import StartError
from tests.engine.paging import Feeder, random_sequences
from tests.engine.test_models_transformers import load


@pytest.fixture(scope="module")
def backend() -> Backend:
    return open_backend("cpu", 1)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "granite", "gpt_neox", "cohere", "vaultgemma"])
def test_shared_ends_are_the_models_own(arch: str, tmp_path: Path, backend: Backend) -> None:
    testmodel.write_model(arch, 0, tmp_path)
    model = load(tmp_path, backend)
    sequence = random_sequences(model.vocab, (23,))
    feeder = Feeder(model, backend, sequence, taps=(-1, model.layers))
    feeder.run()
    first, last = torch.cat(feeder.tapped[0]).split(model.hidden, 1)
    shared = model.shared()
    embedded = shared.embed(backend.ops, torch.tensor(sequence[0], dtype=torch.int32))
    logits, own = shared.logits(backend.ops, last.contiguous()), torch.cat(feeder.logits[0])
    assert (embedded - first).abs().max() < 1e-4 * first.abs().max()
    assert (logits - own).abs().max() < 1e-3 * own.abs().max()


def test_ends_that_are_more_than_matrices_are_refused(tmp_path: Path, backend: Backend) -> None:
    testmodel.write_model("gpt2", 0, tmp_path)
    with pytest.raises(StartError) as refused:
        load(tmp_path, backend).shared()
    assert "embedding of GPT2LMHeadModel" in refused.value.error and "suffix" in refused.value.cure
