"""Every head that can be trained: learns, is saved, and then guesses in the engine what training said it would."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.backends.registry import open_backend
from forerun.cli import main
from forerun.engine.build import assemble
from forerun.engine.drafters.draft import FREE, Commit, Draft, Drafter, Terms
from forerun.engine.drafters.registry import Host, Setting, open_drafter
from forerun.engine.models.load import load_model
from forerun.messages import Start
from forerun.train.kinds import registry
from forerun.train.kinds.registry import open_kind
from forerun.train.shards import Record
from forerun.train.taps import Taps
from tests.engine.tiny import Front, Sequence_, params_for
from tests.train.kinds import asked, setting, texts

SMALL = {
    "eagle3": ["--vocab", "500", "--passes", "2"],
    "medusa": ["--heads", "3"],
    "mtp": ["--passes", "2"],
    "dflash": ["--block", "4", "--draft-layers", "1", "--states", "2"],
    "dspark": ["--block", "3", "--draft-layers", "1", "--states", "2", "--rank", "8"],
}
SMALL |= {f"{kind} reduced": [*SMALL[kind], "--reduced", "--vocab", "300", "--inner", "48"] for kind in ("dflash", "dspark")}
SMALL["dspark near"] = [*SMALL["dspark reduced"], "--draft-layers", "2", "--kv-heads", "4", "--window", "2"]
HEADS = sorted(SMALL)
PROMPTS = [[17, 300, 45, 6, 201, 9], [8, 8, 411]]
LONG = 40


def start(folder: Path) -> Start:
    return Start(model_id=str(folder), device="cpu", threads=1, dtype="float32", max_rows=2, max_total_tokens=96, speculate=8)


class Recorder:
    """A drafter, and its likeliest path at each length of the text. Warm-up has texts too: those asked for are the last."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.needs = drafter.needs
        self._known: dict[int, int] = {}
        self.chains: list[dict[int, list[int]]] = []

    def absorb(self, commit: Commit) -> None:
        for i, row in enumerate(commit.rows):
            if not commit.start[i]:
                self.chains.append({})
            self._known[row] = commit.start[i] + len(commit.tokens[i]) + (commit.next[i] is not None)
        self._drafter.absorb(commit)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        drafts = self._drafter.propose(rows, budget, terms)
        for row, draft in zip(rows, drafts):
            self.chains[-1][self._known[row]] = likeliest(draft)
        return drafts

    def forget(self, rows: list[int]) -> None:
        self._drafter.forget(rows)


def likeliest(draft: Draft) -> list[int]:
    """From the root always the surest child; the first named of equals."""
    path, at = [], -1
    while True:
        children = [node for node, parent in enumerate(draft.parent) if parent == at]
        if not children:
            return path
        at = max(children, key=lambda node: (draft.confidence[node], -node))
        path.append(draft.token[at])


def run(folder: Path, drafter: Drafter | None) -> list[Sequence_]:
    backend = open_backend("cpu", 1)
    asked = start(folder)
    model = load_model(asked, backend, lambda *progress: None)
    opened = drafter or open_drafter("none", Setting())
    front = Front(assemble(asked, backend, model, opened, lambda *progress: None))
    sequences = []
    for prompt in PROMPTS:
        sequences.append(Sequence_(prompt, params_for(prompt, max_new_tokens=LONG)))
        front.admit(sequences[-1])
        front.run(guess=8 if drafter else 0)
    return sequences


@functools.cache
def written(folder: Path) -> list[Record]:
    """Greedy answers of the target, each token certain."""
    found = []
    for number, sequence in enumerate(run(folder, None)):
        tokens = np.array([*sequence.prompt, *sequence.tokens], np.uint32)
        answer = tokens[len(sequence.prompt) :, None]
        found.append(Record(number, 256, len(sequence.prompt), tokens, answer, np.zeros((len(answer), 1), np.float16)))
    return found


def opened(kind: str, folder: Path, text: list[Record], begins: Path | None = None) -> registry.Draft:
    taps = functools.cache(lambda layers: Taps(start(folder), layers))
    name = kind.split()[0]
    return open_kind(name, asked(name, SMALL[kind]), registry.Setting(folder, text, 0, taps, begins))


def trained(kind: str, folder: Path, steps: int) -> registry.Draft:
    head = opened(kind, folder, written(folder))
    optimizer = torch.optim.AdamW([one for one in head.net.parameters() if one.requires_grad], lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(head.loss(written(folder)))
        optimizer.step()
    return head


@pytest.mark.parametrize("kind", HEADS)
def test_it_learns_what_it_reads(kind: str, folder: Path) -> None:
    before = trained(kind, folder, 0).loss(written(folder)).item()
    head = trained(kind, folder, 40)
    assert head.loss(written(folder)).item() < 0.5 * before
    hits = np.concatenate([head.hits(record, 2)[1:-1] for record in written(folder)])
    assert hits[:, 0].mean() > 0.7 and hits.all(1).mean() > 0.4
    assert not head.hits(written(folder)[0], 12)[-3:, 4:].any(), "nothing holds behind the end"


@pytest.mark.parametrize("kind", HEADS)
def test_the_engine_guesses_what_training_said(kind: str, folder: Path, tmp_path: Path) -> None:
    """Place for place: positions, layers, norms, vocabulary and layout are the same on both sides. Of chains: which of two siblings is
    surer is what calibration has learned."""
    head = trained(kind, folder, 12)
    head.save(tmp_path)
    rounded(head, tmp_path)
    backend = open_backend("cpu", 1)
    model = load_model(start(folder), backend, lambda *progress: None)
    host = Host(start(folder), backend, model, lambda *progress: None)
    recorder = Recorder(open_drafter(f"{head.facts['speculator']}={tmp_path}", Setting(8, False, host)))
    answers = run(folder, recorder)
    same = compared = held = 0
    for record, answer, chains in zip(written(folder), answers, recorder.chains[-2:], strict=True):
        assert answer.tokens == record.tokens[record.prompt :].tolist()
        hits = head.hits(record, 4)
        for known, chain in chains.items():
            place = known - record.prompt
            for depth, guess in enumerate(chain[: min(4, record.generated - place)]):
                right = guess == record.tokens[known + depth]
                same, compared, held = same + (hits[place, depth] == right), compared + 1, held + right
                if not right:
                    break
    assert compared > 20 and held > 5 and held < compared
    assert same > 0.98 * compared, f"{same} of {compared} guesses are as training said"


def rounded(head: registry.Draft, folder: Path) -> None:
    """The net as it was saved; and what was saved in float32, for the engine multiplies in the type that weights are stored in."""
    (file,) = folder.glob("*.safetensors")
    saved = {name: value.float() if value.is_floating_point() else value for name, value in load_file(file).items()}
    save_file(saved, file)
    for name, value in head.tensors().items():
        value.copy_(saved[name])


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_goes_on_from_what_was_saved(kind: str, folder: Path, tmp_path: Path) -> None:
    """Also on another text, whose most frequent tokens are others."""
    head = trained(kind, folder, 3)
    head.save(tmp_path)
    rounded(head, tmp_path)
    other = opened(kind, folder, texts(3), tmp_path)
    assert all(torch.equal(value, head.tensors()[name]) for name, value in other.tensors().items())
    for record in written(folder):
        assert np.array_equal(other.hits(record, 3), head.hits(record, 3))


@pytest.mark.parametrize(
    "saved, kind, words, cure",
    [
        ("eagle3", "eagle3", ["--inner", "48"], "the options that this head was made with"),
        ("eagle3", "mtp", [], "is not there"),
        ("dflash", "dspark", SMALL["dspark"], "is not there"),
        ("dflash", "dflash", SMALL["dflash reduced"], "has no draft vocabulary"),
        ("medusa", "medusa", ["--heads", "2"], "give --heads 3"),
        ("dflash", "dflash", [*SMALL["dflash"], "--mask-token", "7"], "give --mask-token 511"),
        ("dspark", "dspark", [*SMALL["dspark"], "--block", "4"], "give --block 3"),
        ("dspark near", "dspark", [*SMALL["dspark near"], "--window", "0"], "give --window 2"),
        ("dspark near", "dspark", [*SMALL["dspark near"], "--draft-layers", "1"], "give --draft-layers 2"),
        ("dspark reduced", "dflash", SMALL["dflash reduced"], "of another kind"),
        ("dspark reduced", "dspark", [*SMALL["dspark reduced"], "--window", "2"], "give --window 0"),
        ("medusa", "model", [], "leave out --from"),
        ("medusa", "grams", [], "leave out --from"),
    ],
)
def test_a_head_goes_on_from_its_own_kind_only(saved: str, kind: str, words: list[str], cure: str, folder: Path, tmp_path: Path) -> None:
    trained(saved, folder, 0).save(tmp_path)
    with pytest.raises(ValueError, match=cure):
        open_kind(
            kind, asked(kind, words), registry.Setting(folder, written(folder), 0, lambda layers: Taps(start(folder), layers), tmp_path)
        )


def say(folder: Path, **says: object) -> None:
    """Another config.json: what is None is left out."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | says
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@pytest.mark.parametrize(
    "kind, says",
    [
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 1]}),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": None, "target_layer_ids": [1, 2]}),
        ("eagle3", {"norm_before_residual": True}),
        ("eagle3", {"rope_theta": None, "rope_parameters": {"rope_theta": 7.0}}),
        ("dflash", {"dflash_config": {"target_layer_ids": [1], "mask_token_id": 511}}),
        ("dspark", {"num_target_layers": 3}),
        ("dspark reduced", {"aux_hidden_state_layer_ids": [2]}),
        ("mtp", {"tokenizer_fingerprint": "of another"}),
        ("medusa", {"tokenizer_fingerprint": "of another"}),
    ],
)
def test_a_head_that_reads_something_else_is_not_gone_on_from(kind: str, says: dict[str, object], folder: Path, tmp_path: Path) -> None:
    """Of the same names and shapes."""
    trained(kind, folder, 0).save(tmp_path)
    say(tmp_path, **says)
    with pytest.raises(ValueError, match=r"its config\.json says .* without --from"):
        opened(kind, folder, written(folder), tmp_path)


@pytest.mark.parametrize(
    "kind, says",
    [
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": None, "target_layer_ids": [0, 1], "torch_dtype": "float16"}),
        ("dflash", {"layer_types": ["full_attention"], "sliding_window": None, "tokenizer_fingerprint": None, "architectures": None}),
        ("medusa", {"tokenizer_fingerprint": None, "base_model_name_or_path": "somebody/elsewhere"}),
    ],
)
def test_what_others_say_otherwise_or_not_at_all_is_no_fault(kind: str, says: dict[str, object], folder: Path, tmp_path: Path) -> None:
    trained(kind, folder, 0).save(tmp_path)
    say(tmp_path, **says)
    opened(kind, folder, written(folder), tmp_path)


def test_no_tensor_of_a_head_is_dropped(folder: Path, tmp_path: Path) -> None:
    """But copies of what the target has itself."""
    head = open_kind("dspark", asked("dspark", [*SMALL["dspark"], "--with-ends"]), setting(folder))
    head.save(tmp_path)
    opened("dspark", folder, written(folder), tmp_path)
    file = tmp_path / "model.safetensors"
    saved = load_file(file)
    for name, value in (("embed_tokens.weight", saved["embed_tokens.weight"] + 1), ("layers.1.norm.weight", torch.ones(4))):
        save_file(saved | {name: value}, file)
        with pytest.raises(ValueError, match=f"{name} would be dropped"):
            opened("dspark", folder, written(folder), tmp_path)


def test_a_head_of_another_target_is_not_gone_on_from(folder: Path, tmp_path: Path) -> None:
    head = trained("eagle3", folder, 0)
    head.save(tmp_path)
    file = tmp_path / "model.safetensors"
    saved = load_file(file)
    save_file(saved | {"d2t": saved["d2t"] + 300}, file)
    with pytest.raises(ValueError, match="of another target"):
        opened("eagle3", folder, written(folder), tmp_path)
    save_file(saved | {"t2d": ~saved["t2d"]}, file)
    with pytest.raises(ValueError, match="t2d is of another target or vocabulary"):
        opened("eagle3", folder, written(folder), tmp_path)


@pytest.mark.parametrize("kind", HEADS)
def test_answers_of_one_token_teach_nothing_and_break_nothing(kind: str, folder: Path) -> None:
    head = trained(kind, folder, 0)
    batch = [dataclasses.replace(one, tokens=one.tokens[: one.prompt + 1], candidates=one.candidates[:1]) for one in written(folder)]
    loss = head.loss([dataclasses.replace(one, logprobs=one.logprobs[:1]) for one in batch])
    torch.autograd.backward(loss)
    assert torch.isfinite(loss) and head.hits(batch[0], 3).shape == (1, 3)


@pytest.mark.parametrize("kind", HEADS)
def test_the_same_seed_gives_the_same_head(kind: str, folder: Path) -> None:
    left, right = (trained(kind, folder, 2).net.state_dict() for _ in range(2))
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_the_command_makes_a_head_with_its_report(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    words = ["--tokens", "20", "--rows", "2", "--longest", "48", "--held-out", "1", "--epochs", "1", "--threads", "1", "--keep-mb", "0"]
    assert main(["train-drafter", "--kind", "medusa", "--heads", "2", "--model-id", str(folder), "--out", str(out), *words]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["kind"] == "medusa" and report["speculator"] == "medusa" and report["vocabulary_covers"] == 1.0
    assert report["bytes"] == (out / "medusa_lm_head.safetensors").stat().st_size
    assert len(load_file(out / "medusa_lm_head.safetensors")) == 4 and "--kind medusa" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    "kind, words, cure",
    [
        ("eagle3", ["--passes", "0"], "--passes 3"),
        ("medusa", ["--heads", "0"], "--heads 4"),
        ("dflash", ["--block", "1"], "2 or more"),
        ("dspark", ["--mask-token", "512"], "512"),
        ("dspark", ["--rank", "0"], "--rank 64"),
        ("dspark", ["--kv-heads", "3"], "use 4"),
        ("dflash", ["--window", "2"], "give --reduced too"),
        ("dflash", ["--window", "-1", "--reduced"], "0 or more"),
        ("dspark", ["--reduced", "--with-ends"], "leave out --with-ends"),
    ],
)
def test_sizes_that_make_no_head_are_refused(kind: str, words: list[str], cure: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=cure):
        open_kind(kind, asked(kind, words), registry.Setting(folder, written(folder), 0, lambda layers: Taps(start(folder), layers)))
