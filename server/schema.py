"""The bodies of the native routes, field by field: what TGI's clients send and what they get back.

Owns names, JSON types, defaults, the order of keys on the wire and the text that the OpenAPI document shows. Knows no limits: ranges
that TGI checks after parsing are only documented here (`_range`) and enforced in `validate.py`, in TGI's order and words; ranges that
TGI's parser itself enforces (unsigned, 32 bit) are enforced by the decoder. What exists once a token is left out of garbage collection
(`gc=False`: it cannot be part of a cycle).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1


def _range(description: str, **bounds: float) -> Meta:
    """A description with bounds for the document only; msgspec would enforce its own `ge`/`le` too early."""
    return Meta(description=description, extra_json_schema=dict(bounds))


U32 = Annotated[int, Meta(ge=0, le=U32_MAX)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Unsigned = Annotated[int, Meta(ge=0)]
FinishReason = Literal["length", "eos_token", "stop_sequence"]


class Grammar(Struct):
    """A constraint on the generated text."""

    type: Literal["json", "json_object", "json_schema", "regex"]
    value: Any


class GenerateParameters(Struct):
    """How to generate. Without this object `do_sample` is true; inside it, false (as in TGI)."""

    adapter_id: Annotated[str | None, Meta(description="LoRA adapter id; an unknown one means the base model")] = None
    best_of: Annotated[Unsigned | None, Meta(description="Generate so many sequences, answer with the one of the highest mean logprob")] = (
        None
    )
    decoder_input_details: Annotated[
        bool, Meta(description="Report ids, texts and logprobs of the prompt's tokens; not when streaming")
    ] = False
    details: Annotated[bool, Meta(description="Report how and why generation ended")] = False
    do_sample: Annotated[bool, Meta(description="Sample instead of taking the most likely token")] = False
    frequency_penalty: Annotated[float | None, _range("0.0 means no penalty", minimum=-2, maximum=2)] = None
    grammar: Annotated[Grammar | None, Meta(description="A constraint on the generated text")] = None
    max_new_tokens: Annotated[
        U32 | None, Meta(description="Most tokens to generate; null: until the end of sequence or of the context")
    ] = None
    repetition_penalty: Annotated[float | None, _range("1.0 means no penalty", exclusiveMinimum=0)] = None
    return_full_text: Annotated[bool | None, Meta(description="Put the prompt before the generated text; null: true on `/` only")] = None
    seed: Annotated[Unsigned | None, _range("Seed of the random numbers; null: a new one each time", maximum=U64_MAX)] = None
    stop: Annotated[list[str], Meta(description="Texts that end the generation; the first one found stays at the end of the text")] = []
    temperature: Annotated[float | None, _range("1.0 leaves the distribution alone, 0 means greedy", minimum=0)] = None
    top_k: Annotated[I32 | None, _range("Keep so many most likely tokens", minimum=1)] = None
    top_n_tokens: Annotated[U32 | None, Meta(description="Also report so many most likely tokens at each position")] = None
    top_p: Annotated[
        float | None, _range("Keep the most likely tokens of this total probability", exclusiveMinimum=0, exclusiveMaximum=1)
    ] = None
    truncate: Annotated[Unsigned | None, Meta(description="Keep only so many last tokens of the prompt")] = None
    typical_p: Annotated[
        float | None, _range("Keep the most typical tokens of this probability", exclusiveMinimum=0, exclusiveMaximum=1)
    ] = None
    watermark: Annotated[bool, Meta(description="Watermark the text (arXiv 2301.10226)")] = False
    speculate: Annotated[U32 | None, Meta(description="Most guessed tokens a step for this request; 0 switches speculation off")] = None
    priority: Annotated[
        I32 | None,
        _range("Higher goes first: each unit counts as having come 10 seconds earlier. null means 0", minimum=-100, maximum=100),
    ] = None
    deadline_ms: Annotated[U32 | None, Meta(description="Give up when the answer is not complete after so many milliseconds")] = None
    origins: Annotated[bool, Meta(description="Say of each token in which step it came, and whether it had been guessed")] = False


class GenerateRequest(Struct):
    inputs: Annotated[str, Meta(description="The prompt", examples=["My name is Olivier and I"])]
    parameters: GenerateParameters | UnsetType = UNSET


class CompatGenerateRequest(GenerateRequest):
    stream: Annotated[bool, Meta(description="Answer with server-sent events")] = False


class PrefillToken(Struct, gc=False):
    id: int
    text: str
    logprob: Annotated[float | None, Meta(description="null for the first token")]


class Token(Struct, gc=False):
    id: int
    text: Annotated[str, Meta(description="What this token adds to the text; empty while a character is incomplete")]
    logprob: float | None
    special: Annotated[bool, Meta(description="Not part of the generated text")]


class SimpleToken(Struct, gc=False):
    id: int
    text: str
    start: Annotated[int, Meta(description="Offset of its first byte in the input")]
    stop: Annotated[int, Meta(description="Offset behind its last byte")]


class Origin(Struct, gc=False):
    """How a token came about."""

    step: Annotated[int, Meta(description="1, 2, 3 …: the step of this sequence that brought it; tokens of one step came together")]
    guessed: Annotated[bool, Meta(description="Guessed ahead and verified; else the model computed it")]


class Speculation(Struct):
    """What guessing ahead did for one sequence."""

    drafted: Annotated[int, Meta(description="Tokens guessed")]
    accepted: Annotated[int, Meta(description="Guesses that came true and are part of the text")]
    steps: Annotated[int, Meta(description="Steps of the model that produced the text")]


class BestOfSequence(Struct):
    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class Details(Struct):
    finish_reason: FinishReason
    generated_tokens: int
    seed: Annotated[int | None, Meta(description="null when the tokens were not sampled")]
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: Annotated[list[BestOfSequence] | UnsetType, Meta(description="The other sequences of `best_of`")] = UNSET
    top_tokens: list[list[Token]] | UnsetType = UNSET
    speculation: Speculation | UnsetType = UNSET
    origins: Annotated[list[Origin] | UnsetType, Meta(description="Of each of `tokens`, when asked for")] = UNSET


class GenerateResponse(Struct):
    generated_text: str
    details: Details | UnsetType = UNSET


class StreamDetails(Struct):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int
    speculation: Speculation | UnsetType = UNSET


class StreamResponse(Struct, gc=False):
    """One event of a stream: one token. The last one also carries the whole text."""

    index: Annotated[int, Meta(description="1, 2, 3 …")]
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: Annotated[str | None, Meta(description="null on all but the last event")] = None
    details: Annotated[StreamDetails | None, Meta(description="null on all but the last event, and without `details`")] = None
    origin: Annotated[Origin | UnsetType, Meta(description="When `origins` are asked for")] = UNSET


class ErrorResponse(Struct):
    error: str
    error_type: str


class LoadProgress(Struct):
    """How far loading is, in the stage's own unit."""

    stage: str
    done: int
    total: int


class HealthError(ErrorResponse):
    progress: LoadProgress | UnsetType = UNSET


class Info(Struct):
    """TGI's fields first; those behind `docker_label` are Forerun's."""

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: Annotated[str, Meta(description="The TGI version whose behaviour this server follows")]
    sha: str | None
    docker_label: str | None
    max_top_n_tokens: int
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int
    server: str
    server_version: str
    model_dtype: str
    model_device_type: str
    speculator: str
    speculate: int
