"""`forerun train-drafter`: write text, learn from it, measure, report. Started again with the same words it goes on where it was."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from forerun.engine.errors import StartError
from forerun.hub import ModelNotFound, locate
from forerun.messages import Start
from forerun.train import acceptance, heldout, report
from forerun.train.frame import Frame
from forerun.train.kinds.registry import KINDS, Setting, open_kind, options
from forerun.train.progress import say
from forerun.train.shards import Record
from forerun.train.states import Keeper, Shelf
from forerun.train.taps import Taps
from forerun.train.target import Target
from forerun.train.trainer import Plan, Trainer
from forerun.train.write import Wanted, conversations_of, gather, same_text

WIDTH = 16
"""candidates of the target that are kept at each place"""
QUICK = 4
"""held-out texts of each kind that are looked at after each epoch; at the end it is all of them"""
PROMPT_ROWS, PROMPT_TOKENS = 16, 2048
"""held-out prompts that are answered side by side, and the longest of them with its answer"""


def main(argv: Sequence[str]) -> int:
    """0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    asked = _asked(argv)
    try:
        _run(asked, locate(asked.model_id), f"forerun train-drafter {shlex.join(argv)}")
    except (ValueError, ModelNotFound, FileNotFoundError, StartError) as wrong:
        print(f"forerun train-drafter: {wrong}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        return 130
    return 0


def _asked(argv: Sequence[str]) -> argparse.Namespace:
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--kind", choices=sorted(KINDS), default="model", help="what to train (default: %(default)s)")
    kind = first.parse_known_args(argv)[0].kind
    parser = argparse.ArgumentParser(prog="forerun train-drafter", description=__doc__, parents=[first], allow_abbrev=False)
    parser.add_argument("--model-id", required=True, help="the target: a model folder")
    parser.add_argument("--out", type=Path, required=True, help="the folder that the draft is written to")
    parser.add_argument("--work", type=Path, help="where text and checkpoints are kept (default: OUT.work)")
    parser.add_argument("--threads", type=int, default=0, help="compute threads (default: one for each core)")
    parser.add_argument("--seed", type=int, default=0)
    _text_options(parser)
    learning = parser.add_argument_group("learning")
    learning.add_argument("--epochs", type=int, default=6, help="times that each text is read (default: %(default)s)")
    learning.add_argument(
        "--minutes", type=float, default=0.0, help="end after so many, whatever is left of the epochs (default: 0, no end)"
    )
    learning.add_argument("--batch-tokens", type=int, default=4096, help="tokens of a step (default: %(default)s)")
    learning.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate (default: %(default)s)")
    learning.add_argument(
        "--keep-mb", type=int, default=2048, help="hidden states of the target that are kept in WORK/states (default: %(default)s)"
    )
    learning.add_argument(
        "--keep-layers",
        type=_layers,
        default=(),
        metavar="N,N,…",
        help="of which layers they are kept already while the text is written, which costs little then (default: none)",
    )
    learning.add_argument(
        "--from",
        type=Path,
        dest="begins",
        metavar="DIR",
        help="go on from this head, of the same kind, options and target (default: begin anew)",
    )
    learning.add_argument("--float32", action="store_true", help="do not compute in bfloat16")
    options(kind, parser)
    asked = parser.parse_args(argv)
    if asked.epochs < 1 <= parser.get_default("epochs"):
        parser.error(f"--epochs {asked.epochs} would write a draft that learned nothing: use 1 or more")
    return asked


def _text_options(parser: argparse.ArgumentParser) -> None:
    text = parser.add_argument_group("the text")
    text.add_argument("--tokens", type=int, default=1_000_000, help="answered tokens to learn from (default: %(default)s)")
    text.add_argument("--rows", type=int, default=96, help="texts that are written side by side (default: %(default)s)")
    text.add_argument("--longest", type=int, default=512, help="tokens of a conversation (default: %(default)s)")
    text.add_argument(
        "--prompts", type=Path, action="append", default=[], help='held-out prompts, lines of {"turns": ["…"]}; may be repeated'
    )
    text.add_argument("--held-out", type=int, default=16, help="prompts of each file (default: %(default)s)")
    text.add_argument("--held-out-tokens", type=int, default=128, help="of an answer to such a prompt (default: %(default)s)")


def _run(asked: argparse.Namespace, folder: Path, command: str) -> None:
    work: Path = asked.work or asked.out.with_name(asked.out.name + ".work")
    shelf = Shelf(work / "states", asked.keep_mb << 20)
    learnt, turns, groups = _text(asked, folder, work, shelf)
    threads = asked.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)  # the writer's kernels have threads of their own and left torch with one
    start = Start(model_id=str(folder), threads=threads)
    setting = Setting(folder, learnt, asked.seed, lambda layers: Taps(start, layers, shelf), asked.begins, turns)
    draft = open_kind(asked.kind, asked, setting)
    torch.set_num_threads(threads)  # a reader of taps has its own too
    plan = Plan(asked.epochs, asked.batch_tokens, asked.rate, asked.seed, not asked.float32, _seen(asked.begins))
    trainer = Trainer(draft, learnt, plan, work / f"{asked.kind}.pt", say, asked.minutes)

    def look(most: int) -> dict[str, dict[str, object]]:
        return {name: acceptance.measure(draft, texts[:most]) for name, texts in groups.items()}

    def quick() -> dict[str, object]:
        measured = look(QUICK)
        say("\n".join(f"  {name:12} {acceptance.line(one)}" for name, one in measured.items()))
        return {"first": {name: one["first"] for name, one in measured.items()}}

    trainer.run(quick)
    draft.save(asked.out)
    facts = {"target": folder.name, "kind": asked.kind, "command": command, "tokens": asked.tokens, "steps": trainer.step}
    facts |= {"conversations": len(learnt), "minutes": trainer.seconds / 60, "threads": threads} | draft.facts
    say(report.save(asked.out, facts, look(1 << 30), trainer.history))
    say(f"written to {asked.out}; serve it with --speculator {draft.facts['speculator']}={asked.out}")


def _seen(folder: Path | None) -> str:
    """A folder as it is seen from this one, however it is spelled and wherever the whole tree is mounted."""
    return "" if folder is None else os.path.relpath(folder.resolve())


def _layers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _text(asked: argparse.Namespace, folder: Path, work: Path, shelf: Shelf) -> tuple[list[Record], list[Record], dict[str, list[Record]]]:
    """What is learnt from, the turns that it answers, and by name what is held out. Writes what is missing of either."""
    work.mkdir(parents=True, exist_ok=True)
    same_text(work / "text.json", folder, asked.seed, asked.longest)
    frame = Frame(folder)
    start = Start(model_id=str(folder), threads=asked.threads)
    path = work / "text.bin"

    def writer(rows: int, longest: int, layers: Sequence[int] = ()) -> Callable[[], Target]:
        return lambda: Target(start, rows, longest, WIDTH, layers)

    keeper = Keeper(shelf, asked.keep_layers) if asked.keep_layers else None
    gather(writer(asked.rows, asked.longest, asked.keep_layers), frame, path, Wanted(asked.seed, asked.tokens), say, keeper)
    prompts = heldout.Prompts(tuple(asked.prompts), asked.held_out, asked.held_out_tokens, PROMPT_TOKENS)
    groups = heldout.answered(writer(PROMPT_ROWS, PROMPT_TOKENS), frame, work / "held-out.bin", prompts, say)
    learnt, turns, own = heldout.split(conversations_of(path, asked.tokens))
    return learnt, turns, {heldout.OWN: own[: 4 * asked.held_out], **groups}
