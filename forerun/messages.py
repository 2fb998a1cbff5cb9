"""What the front process and a worker say to each other: the contract both sides agree on.

Every message is one frame of a ring (see `ring.py`), encoded by msgspec as a MessagePack array whose first
element is the message's tag. Structs are frozen: what crosses the seam never changes.

Order inside a worker: the plans of one ring are applied in the order they were sent; inside a plan, `drop` comes before
`admit`, and `admit` before `feed`. A plan never depends on the token *values* of the previous result (rows remember their
tokens), so the front may send plan n+1 before result n has arrived.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Finish = Literal["", "length", "eos_token"]
"""Why the worker ended a sequence; empty while it runs. Text rules (stop strings) end a sequence in the front."""
NO_GRAMMARS = "no grammars"
"""the fact of a worker that cannot have any: why"""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of everything that is a frame of its own (data only; carries no behaviour)."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How the next token of a sequence is chosen. Neutral values switch a step off.

    `seed` is always set (the front draws one when a request has none); `sample` is already resolved by TGI's rule, so the worker
    never guesses. Token i of the generated part (i counts from 0, `i = position - prompt_tokens`) throws the dice (seed, i).
    """

    seed: int
    """unsigned 64 bit"""
    prompt_tokens: int
    """how many of the sequence's tokens are prompt; never changes, also when a sequence is admitted again later"""
    max_new_tokens: int
    """generated tokens in all, counted from `prompt_tokens`"""
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    watermark: bool = False
    stop_ids: tuple[int, ...] = ()
    """token ids that end the sequence; the id itself is emitted"""
    logprobs: bool = True
    """report the log-probability of each emitted token (after processing, TGI's rule)"""
    top_n: int = 0
    """also report this many most likely tokens at each position"""
    prompt_logprobs: bool = False
    """report log-probabilities (of the model, unprocessed) of the prompt's tokens 1…; the row must be admitted with computed = 0"""
    presence_penalty: float = 0.0
    """OpenAI's: subtracted from every token that was generated before"""
    count_penalty: float = 0.0
    """OpenAI's frequency_penalty: subtracted as often as the token was generated before"""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, what is added to its logit), ids below the vocabulary"""
    raw_logprobs: bool = False
    """report the model's own log-probabilities instead of those after processing"""
    grammar: str = ""
    """what the generated text must follow, in the form that `engine/grammar.py` compiles; empty = anything"""


class Admit(msgspec.Struct, frozen=True, array_like=True):
    """A new or resumed row, in full. `tokens`: all ids known so far, prompt and generated. `computed`: how many of them already
    have KV in `pages` (a prefix hit; a multiple of the page size, and less than len(tokens)). `pages`: page ids in order of
    position; must cover at least what the row's Feed in this plan writes."""

    row: int
    tokens: list[int]
    computed: int
    pages: list[int]
    params: SamplingParams
    adapter: str | None = None


class Feed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row's share of this step: its next `known` tokens (from index `computed` on), then at most `guess` guessed nodes.

    When the known tokens reach the end of what the row knows, the step picks a token there and emits it (with every accepted
    guess before it); otherwise it is a prefill chunk and nothing is emitted. A decode step is `known = 1, guess = 0`. A Feed for a
    row that ended in an earlier step (the front did not know yet) is ignored. `pages`: newly granted ones, appended to the row's."""

    row: int
    known: int
    guess: int = 0
    pages: list[int] = []


class StepPlan(Message, frozen=True, array_like=True, tag="plan"):
    """One step. `budget`: guessed nodes in all; `price`: survival below which no node is worth its cost. Where there are tolls they
    decide about the rest: n + 1 nodes are kept only if together they bring `toll[n]` tokens, each less `entry_price` for every position of
    its row; or that times `discount` where none would be kept otherwise."""

    step: int
    admit: list[Admit] = []
    feed: list[Feed] = []
    drop: list[int] = []
    budget: int = 0
    price: float = 0.0
    toll: list[float] = []
    entry_price: float = 0.0
    discount: float = 1.0
    goodput: float = 0.0
    """tokens a second that the replica makes, which a second of drafting is worth; 0 = not known"""
    weights: dict[int, float] = {}
    """by row: what a guessed token of it is worth where that is not one"""


class Emit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What became true for one row in this step. `tokens`: committed ids, oldest first (accepted guesses, then the pick). `logprobs`: one
    for each token, or empty when not asked. `top`: for each token its (id, logprob) list, most likely first, or empty. `finish` ends the
    sequence with the last token of `tokens`. `error` ends it with a failure that concerns this row alone. `prompt_logprobs`: those of the
    prompt tokens whose predecessors were fed in this step, in order. `expected`: how many guesses the worker believed to be accepted,
    where it chose them by tolls. `prompt_top`: parallel to `prompt_logprobs`, as `top`, where `raw_logprobs` asks for the model's own (TGI
    shows no alternatives of prompts). An Emit without tokens, finish and error, for a row that was to pick: its grammar is not ready, and
    nothing was picked; all its tokens but the newest are computed."""

    row: int
    tokens: list[int] = []
    logprobs: list[float] = []
    top: list[list[tuple[int, float]]] = []
    drafted: int = 0
    accepted: int = 0
    finish: Finish = ""
    error: str = ""
    prompt_logprobs: list[float] = []
    expected: float = 0.0
    prompt_top: list[list[tuple[int, float]]] = []


class StepResult(Message, frozen=True, array_like=True, tag="result"):
    """Answer to the plan of the same `step`. Times in microseconds. `chosen_us`: of `draft_us`, what the drafter need not have spent: it
    weighs by itself what that brings (`StepPlan.goodput`). `rows`: rows of the target's forward; `nodes`: guessed ones;
    `depths[d]`: how many of those stand d + 1 steps behind their root. `sources`: where several drafters are joined, for each in the order
    of `Ready.drafter` the nodes that it proposed, and those of them that were accepted, by depth as well."""

    step: int
    emit: list[Emit] = []
    draft_us: int = 0
    verify_us: int = 0
    rows: int = 0
    nodes: int = 0
    depths: list[int] = []
    sources: list[tuple[list[int], list[int]]] = []
    draft_failures: list[str] = []
    """one line for each time that the drafter raised since the last result; no request saw anything of it"""
    late: tuple[int, int, int] = (0, 0, 0)
    """what the drafter had to do without since the last result: positions of texts, answers of a draft service, and rows that one had
    no room for"""
    chosen_us: int = 0
    caught_up: int = -1
    """tokens that the drafter read in this step, beyond those that are news in any; −1: it reads all of a row when it is asked about it"""


class Start(Message, frozen=True, array_like=True, tag="start"):
    """The first frame a worker reads: all it needs to load and to size itself. Built from the configuration in `launch.py`."""

    model_id: str
    """a local directory or a hub id that is in the hub cache"""
    revision: str | None = None
    device: str = "auto"
    dtype: str | None = None
    """bfloat16, float16, float32 or None (best of the device that the checkpoint allows)"""
    quantize: str | None = None
    kv_dtype: str | None = None
    rank: int = 0
    world: int = 1
    threads: int = 0
    """compute threads; 0 = chosen from the machine"""
    max_rows: int = 128
    """sequences that may be running at once"""
    max_total_tokens: int = 0
    """longest sequence; 0 = what the model allows"""
    max_step_tokens: int = 0
    """most known tokens in one step; 0 = the worker chooses"""
    max_pool_tokens: int = 0
    """KV positions in all; 0 = from the memory that is free"""
    memory_fraction: float = 1.0
    hub_cache: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    rope_scaling: str | None = None
    rope_factor: float | None = None
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    tokenizer: str = ""
    """the model's tokenizer.json, for grammars; empty = there can be none"""
    speculator: str = "none"
    speculate: int = 0
    acceptance: Literal["dice", "rejection"] = "dice"
    """how it is decided which guesses hold"""
    echo: bool = False
    """answer plans without a model (`engine/echo.py`)"""
    test_faults: bool = False
    """accept Inject messages"""


class Progress(Message, frozen=True, array_like=True, tag="progress"):
    """Loading and warm-up, for the log and for health. `stage`: loading, packing, warming; `done` of `total`, in the stage's unit."""

    stage: str
    done: int
    total: int


class Ready(Message, frozen=True, array_like=True, tag="ready"):
    """The worker can take plans. `rows`: row numbers are 0 … rows-1. `pages`: page ids are 0 … pages-1. `max_nodes`: most guesses a row
    can have. `max_step_tokens`: most known tokens of a step. `max_tokens`: longest sequence. `step_seconds`: measured cost of
    (a decode step of one row, a prefill step of `max_step_tokens`). `memory`: the plan in bytes, by name (weights, kv, activations, …)."""

    rows: int
    pages: int
    page_tokens: int
    max_nodes: int
    vocab: int
    device: str
    dtype: str
    drafter: str
    max_tokens: int
    max_step_tokens: int
    step_seconds: tuple[float, float] = (0.0, 0.0)
    memory: dict[str, int] = {}
    costs: list[tuple[int, float]] = []
    """(rows, seconds) of decode steps of one row with guesses and next to no context, from one row on; empty when there are no guesses"""
    segment_seconds: float = 0.0
    """what each further row with its guesses adds to such a step"""
    contexts: list[tuple[int, float, float]] = []
    """(positions, read, score), ascending: where rows have KV of so many positions, each adds `read` seconds however many guesses the row
    has, and `score` for the row and for each of its guesses"""
    facts: dict[str, str] = {}
    """what was chosen and why, for the log and `doctor`: threads, kernels, weight format, …"""
    max_step_nodes: int = 0
    """most guesses of a step, all rows together; what a plan allows beyond is not used"""
    rough: bool = False
    """`costs` and what belongs to it are a first look: a `Profile` follows when the worker was idle for long enough"""


class Profile(Message, frozen=True, array_like=True, tag="profile"):
    """What steps cost, of a worker that has guesses: `Ready` has a rough one or one that was remembered; this follows once, when the worker
    was idle for long enough to measure it. Fields as in `Ready`."""

    costs: list[tuple[int, float]] = []
    segment_seconds: float = 0.0
    contexts: list[tuple[int, float, float]] = []
    rough: bool = False


class Fault(Message, frozen=True, array_like=True, tag="fault"):
    """The worker cannot go on and exits. `error`: what happened, one line; `cure`: what the operator can do. `fatal`: starting
    it again would fail alike (a wrong model folder, too little memory)."""

    error: str
    cure: str = ""
    fatal: bool = False


class Inject(Message, frozen=True, array_like=True, tag="inject"):
    """Test hook, refused unless the worker was started with `test_faults`. `kind`: die (SIGKILL itself), hang (stop stepping), slow
    (sleep `value` seconds a step), fail (a row error for the row that next reaches `value` generated tokens), raise (in the step)."""

    kind: Literal["die", "hang", "slow", "fail", "raise"]
    value: float = 0.0


class Stop(Message, frozen=True, array_like=True, tag="stop"):
    """Leave at once, in order."""


Down = Start | StepPlan | Inject | Stop
Up = Progress | Ready | Profile | StepResult | Fault
