"""A finished step as the controller, and as whoever keeps the metrics, wants to hear of it."""

from __future__ import annotations

from forerun.messages import StepResult
from forerun.router.events import Tally
from forerun.router.guesses import Round
from forerun.router.observer import StepReport


def round_of(tally: Tally, result: StepResult, seconds: float) -> Round:
    return Round(
        roots=tally.roots,
        rows=result.rows,
        nodes=result.nodes,
        asked=tally.asked,
        read=tally.read,
        tokens=tally.tokens,
        seconds=seconds,
        draft_seconds=result.draft_us / 1e6 if tally.asked else 0.0,
        prefill_tokens=tally.prefill_tokens,
        drafts=tally.drafts,
        chosen_seconds=result.chosen_us / 1e6 if tally.asked else 0.0,
        caught_up=result.caught_up,
    )


def report_of(tally: Tally, result: StepResult, seconds: float) -> StepReport:
    return StepReport(
        seconds=seconds,
        prefill_tokens=tally.prefill_tokens,
        decode_rows=tally.decode_rows,
        rows=result.rows,
        nodes=result.nodes,
        tokens=tally.tokens,
        drafted=tally.drafted,
        accepted=tally.accepted,
        draft_us=result.draft_us,
        verify_us=result.verify_us,
        asked=tally.asked,
        drafts=tally.drafts,
        accepted_at=tally.accepted_at,
        sources=by_source(tally, result),
        draft_failures=len(result.draft_failures),
        late_positions=result.late[0],
        late_answers=result.late[1],
        unserved=result.late[2],
    )


def by_source(tally: Tally, result: StepResult) -> list[tuple[list[int], list[int]]]:
    """Verified and accepted guesses by depth, for each drafter. A worker with one drafter leaves it to the front to count."""
    return result.sources or [(result.depths, tally.accepted_at)]
