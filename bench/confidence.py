"""How honest a drafter's confidences are, and what they save: `python -m forerun.bench.confidence --speculator dspark=DIR,tree=chain`.

Answers are written in this process, several side by side, with as many guesses as the drafter makes. Along the likeliest path of each
draft every guess behind which all held is scored with the confidence that it left the drafter with, which is what the controller gets.

    calibration error   Σ |confidence − share that held|, over bins of equal width, weighted by the guesses in them
    wasted rows         a policy verifies the guesses whose survival is at least a price; wasted is what of these did not hold. Compared
                        where as many guesses a step are accepted, hence at equal goodput: by the confidences, and by counters, which
                        know of a guess only its place in the draft (acceptance by place, discounted for each sequence, from what all
                        sequences had before)

The first answers teach the calibration and are not scored.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from forerun.backends.registry import open_backend
from forerun.bench import workloads
from forerun.bench.template import chat_form
from forerun.engine.build import assemble
from forerun.engine.drafters.draft import FREE, Commit, Draft, Drafter, Terms
from forerun.engine.drafters.registry import Host, Setting, open_drafter
from forerun.engine.engine import Engine
from forerun.engine.models.load import load_model
from forerun.messages import Admit, Feed, SamplingParams, Start, StepPlan

BINS = 15
DISCOUNT, STRENGTH = 0.98, 4.0
"""of the counters: what an observation of one step ago counts, and how many observations what all sequences had is worth"""
SHARES = (0.5, 0.7, 0.9)
"""of the guesses that would hold if all were verified: where wasted rows are compared"""


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """The likeliest path of a draft of sequence `text`: what was said of each guess, and how many from the root on held."""

    text: int
    confidence: Sequence[float]
    held: int


class Recorder:
    """A drafter that is listened to. `text`: the sequence that each row is, set by whoever admits rows."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.needs = drafter.needs
        self.text: dict[int, int] = {}
        self.chains: list[Chain] = []
        self._open: dict[int, tuple[list[int], list[float]]] = {}

    def absorb(self, commit: Commit) -> None:
        for row, tokens, newest in zip(commit.rows, commit.tokens, commit.next):
            guessed, confidence = self._open.pop(row, ([], []))
            truth = [*tokens[1:], newest]
            held = next((i for i, (guess, true) in enumerate(zip(guessed, truth)) if guess != true), min(len(guessed), len(truth)))
            if guessed and held < len(truth):  # else the text ended before the draft did
                self.chains.append(Chain(self.text[row], confidence, held))
        self._drafter.absorb(commit)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        drafts = self._drafter.propose(rows, budget, terms)
        self._open = {row: likeliest(draft) for row, draft in zip(rows, drafts) if draft.count}
        return drafts

    def forget(self, rows: list[int]) -> None:
        self._drafter.forget(rows)


def likeliest(draft: Draft) -> tuple[list[int], list[float]]:
    """From the root always the surest child: tokens and confidences."""
    tokens: list[int] = []
    confidence: list[float] = []
    at = -1
    while children := [node for node, parent in enumerate(draft.parent) if parent == at and not draft.probe[node]]:
        at = max(children, key=lambda node: draft.confidence[node])
        tokens.append(draft.token[at])
        confidence.append(draft.confidence[at])
    return tokens, confidence


def scored(chain: Chain) -> Sequence[tuple[float, bool]]:
    """(confidence, held) of each guess behind which all held."""
    return [(sure, place < chain.held) for place, sure in enumerate(chain.confidence[: chain.held + 1])]


def calibration_error(chains: Sequence[Chain]) -> float:
    sums = [[0.0, 0.0, 0.0] for _ in range(BINS)]
    for sure, held in itertools.chain.from_iterable(map(scored, chains)):
        one = sums[min(BINS - 1, int(sure * BINS))]
        one[0], one[1], one[2] = one[0] + 1, one[1] + sure, one[2] + held
    return sum(abs(said - true) for _, said, true in sums) / max(1.0, sum(count for count, _, _ in sums))


def counted(chains: Sequence[Chain]) -> list[Chain]:
    """The same drafts with what counters would have said of them, each before it was seen."""
    own: dict[tuple[int, int], tuple[float, float]] = {}
    everyone: dict[int, tuple[float, float]] = {}
    found = []
    for chain in chains:
        said = []
        for place in range(len(chain.confidence)):
            held, seen = everyone.get(place, (1.0, 2.0))
            mine, looked = own.get((chain.text, place), (0.0, 0.0))
            said.append((mine + STRENGTH * held / seen) / (looked + STRENGTH))
        found.append(dataclasses.replace(chain, confidence=said))
        for place, (_, right) in enumerate(scored(chain)):
            held, seen = everyone.get(place, (1.0, 2.0))
            everyone[place] = held + right, seen + 1.0
            mine, looked = own.get((chain.text, place), (0.0, 0.0))
            own[chain.text, place] = DISCOUNT * mine + right, DISCOUNT * looked + 1.0
    return found


def wasted(chains: Sequence[Chain], accepted: float) -> float:
    """Rows a step that did not hold, at the price at which so many guesses a step hold."""
    nodes = []
    for chain in chains:
        survival = 1.0
        for place, sure in enumerate(chain.confidence):
            survival *= sure
            nodes.append((-survival, place < chain.held))
    nodes.sort(key=lambda node: node[0])
    steps = len(chains)
    held = list(itertools.accumulate(right for _, right in nodes))
    verified = bisect.bisect_left(held, accepted * steps) + 1
    return (verified - accepted * steps) / steps


class Writer:
    """Writes answers side by side, the next where one has ended."""

    def __init__(self, engine: Engine, recorder: Recorder, guesses: int) -> None:
        self._engine, self._recorder, self._guesses = engine, recorder, guesses
        self._number = 0

    def write(self, prompts: Sequence[Sequence[int]], rows: int, tokens: int, stop: tuple[int, ...]) -> None:
        size = self._engine.ready.page_tokens
        waiting = list(enumerate(prompts))[::-1]
        pages = list(range(self._engine.ready.pages))
        running: dict[int, list[int]] = {}
        while waiting or running:
            admits: list[Admit] = []
            feeds = [Feed(row, 1, self._guesses, []) for row in running]
            for row in range(rows):
                if row not in running and waiting:
                    text, prompt = waiting.pop()
                    granted = [pages.pop() for _ in range(-(-(len(prompt) + tokens + self._guesses) // size))]
                    params = SamplingParams(seed=0, prompt_tokens=len(prompt), max_new_tokens=tokens, stop_ids=stop)
                    admits.append(Admit(row, list(prompt), 0, [], params))
                    feeds.append(Feed(row, len(prompt), 0, granted))
                    running[row] = granted
                    self._recorder.text[row] = text
            self._number += 1
            plan = StepPlan(self._number, admits, feeds, [], budget=self._guesses * len(feeds))
            for emit in self._engine.step(plan).emit:
                if emit.error:
                    raise RuntimeError(emit.error)
                if emit.finish:
                    pages += running.pop(emit.row)


def measure(start: Start, speculator: str, prompts: Sequence[Sequence[int]], tokens: int, stop: tuple[int, ...] = ()) -> list[Chain]:
    """What became of the drafts of `speculator` for greedy answers of so many tokens at the most, in the order they were made."""
    backend = open_backend(start.device, start.threads, start.memory_fraction)

    def said(stage: str, done: int, total: int) -> None:
        return None

    model = load_model(start, backend, said)
    setting = Setting(start.speculate, backend.caps.tree_attention, Host(start, backend, model, said))
    recorder = Recorder(open_drafter(speculator, setting))
    engine = assemble(start, backend, model, recorder, said)
    recorder.chains.clear()  # warm-up has texts too
    Writer(engine, recorder, recorder.needs.most).write(prompts, start.max_rows, tokens, stop)
    return recorder.chains


def table(chains: Sequence[Chain]) -> str:
    """Of the chains behind the first fifth, which taught."""
    first = len(chains) // 5
    sure, counters = chains[first:], counted(chains)[first:]
    most = sum(chain.held for chain in sure) / len(sure)
    lines = [
        f"{len(sure)} drafts, {sum(len(chain.confidence) for chain in sure) / len(sure):.1f} guesses long, of which {most:.2f} held",
        f"calibration error: {calibration_error(sure):.1%}; of counters by place: {calibration_error(counters):.1%}\n",
        "| accepted guesses a step | wasted rows a step, by confidence | by counters | less |",
        "|---|---|---|---|",
    ]
    for share in SHARES:
        own, other = wasted(sure, share * most), wasted(counters, share * most)
        lines.append(f"| {share * most:.2f} | {own:.2f} | {other:.2f} | {1 - own / max(other, 1e-9):.0%} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-id", type=Path, default=Path("models/smollm2-135m-instruct"), help="(default: %(default)s)")
    parser.add_argument("--speculator", required=True, help="one drafter with weights")
    parser.add_argument("--prompts", type=Path, help="a folder of NAME.jsonl files (default: prompts of our own)")
    parser.add_argument("--each", type=int, default=8, help="prompts of each file (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="most of an answer (default: %(default)s)")
    parser.add_argument(
        "--longest", type=int, default=512, help="tokens of a prompt, of whose beginning more are left out (default: %(default)s)"
    )
    parser.add_argument("--rows", type=int, default=8, help="answers side by side (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="(default: one for each core)")
    asked = parser.parse_args(argv)
    tokenizer, form = tokenizers.Tokenizer.from_file(str(asked.model_id / "tokenizer.json")), chat_form(asked.model_id)
    kinds = workloads.from_folder(asked.prompts) if asked.prompts else workloads.made()
    texts = [tokenizer.encode(form(text), add_special_tokens=False).ids for kind in kinds for text in kind.prompts[: asked.each]]
    random.Random(0).shuffle(texts)
    longest = asked.longest + asked.tokens + 32
    start = Start(
        str(asked.model_id),
        threads=asked.threads,
        max_rows=asked.rows,
        max_total_tokens=longest,
        max_pool_tokens=asked.rows * (longest + 32),
    )
    stop = tuple({id for name in ("<|im_end|>", "<|endoftext|>") if (id := tokenizer.token_to_id(name)) is not None})
    print(table(measure(start, asked.speculator, [text[-asked.longest :] for text in texts], asked.tokens, stop)))


if __name__ == "__main__":
    main()
