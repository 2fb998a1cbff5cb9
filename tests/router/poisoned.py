"""A worker that dies of certain prompts, every time: `python -m tests.router.poisoned`, as `forerun.engine.worker`.

A row whose prompt begins with POISON kills it in the step that would bring the row's token number `prompt[1]`; with BROKEN any step does.
"""

from __future__ import annotations

import os
import signal
import sys

from forerun.engine.echo import Echo
from forerun.engine.worker import ReportProgress, Worker, die_with
from forerun.messages import Start, StepPlan, StepResult
from forerun.ring import Reader, Ring, Writer

POISON = 666
BROKEN = "broken"


class Poisoned(Echo):
    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self._broken = start.model_id == BROKEN

    def step(self, plan: StepPlan) -> StepResult:
        result = super().step(plan)
        for feed in plan.feed:
            row = self._rows.get(feed.row)
            if self._broken or (row and row.tokens[0] == POISON and len(row.tokens) - row.params.prompt_tokens > row.tokens[1]):
                os.kill(os.getpid(), signal.SIGKILL)
        return result


def build(start: Start, progress: ReportProgress) -> Poisoned:
    return Poisoned(start)


if __name__ == "__main__":
    parent, *fds = map(int, sys.argv[1:])
    die_with(parent)
    sys.exit(Worker(Reader(Ring(*fds[:3])), Writer(Ring(*fds[3:])), build).run())
