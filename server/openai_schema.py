"""The bodies of the `/v1` routes, as OpenAI's clients send and read them, with the fields that TGI added.

Owns names, JSON types and the order of keys on the wire (TGI's). What TGI refused although OpenAI's clients send it (`stop` as a text,
`logit_bias` as an object, `stream_options: null`, OpenAI's `response_format`) is part of the types here; ranges and meaning are
`openai.py`'s business. Unknown fields are ignored, as both of them do.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from forerun.server.schema import I32, U32, Origin, SimpleToken, Unsigned

ChatFinish = Literal["stop", "length", "tool_calls"]


class Part(Struct):
    """A piece of a message. Only text is read, also that of a refusal; others are refused."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def shown(self) -> str | None:
        return self.refusal if self.type == "refusal" else self.text


class CalledFunction(Struct):
    """A call in the conversation so far. `arguments`: JSON text, as OpenAI has it, or the object itself."""

    name: str
    arguments: Any = None
    parameters: Any = None


class ToolCall(Struct):
    function: CalledFunction
    id: str | None = None
    type: str = "function"


class Message(Struct):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Function(Struct):
    """A tool's signature: its parameters are a JSON schema."""

    name: str
    description: str | None = None
    parameters: Any = None
    arguments: Any = None
    strict: bool | None = None


class Tool(Struct):
    function: Function
    type: str = "function"


class FunctionName(Struct):
    name: str


class ToolChoice(Struct):
    function: FunctionName
    type: str = "function"


class StreamOptions(Struct):
    include_usage: Annotated[bool | None, Meta(description="Send one more chunk with the usage before [DONE]")] = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(Struct):
    """OpenAI's form (`json_schema`), TGI's (`value`), or that of others (`schema`)."""

    type: str
    json_schema: Any = None
    value: Any = None
    schema: Any = None


class StructuredOutputs(Struct):
    """vLLM's newer form of `guided_*`; one of them."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class _Sampling(Struct):
    """What chat and completions share."""

    model: Annotated[str | None, Meta(description="Echoed; there is one model")] = None
    frequency_penalty: Annotated[float | None, Meta(description="−2 … 2, by how often a token was generated")] = None
    presence_penalty: Annotated[float | None, Meta(description="−2 … 2, for every token that was generated")] = None
    repetition_penalty: Annotated[float | None, Meta(description="As on /generate")] = None
    logit_bias: dict[str, float] | list[float] | None = None
    max_tokens: Annotated[U32 | None, Meta(description="Most tokens to generate; null: to the end of the context")] = None
    n: Annotated[U32 | None, Meta(description="So many answers")] = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, Meta(description="0 means greedy; null means 1")] = None
    top_p: float | None = None
    top_k: I32 | None = None
    typical_p: float | None = None
    user: Annotated[Any, Meta(description="Not read")] = None
    speculate: Annotated[U32 | None, Meta(description="Most guessed tokens a step for this request; 0 switches speculation off")] = None
    priority: I32 | None = None
    deadline_ms: U32 | None = None
    origins: Annotated[bool, Meta(description="Say of each token in which step it came, and whether it had been guessed")] = False
    response_format: ResponseFormat | None = None
    guided_json: Annotated[Any, Meta(description="vLLM's: a JSON schema that the text follows")] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: Annotated[str | None, Meta(description="vLLM's: a grammar in Lark's or GBNF's notation")] = None
    structured_outputs: StructuredOutputs | None = None
    grammar: Annotated[Any, Meta(description="As on /generate, or a grammar in GBNF's notation")] = None


class ChatRequest(_Sampling, kw_only=True):
    messages: list[Message]
    max_completion_tokens: Annotated[U32 | None, Meta(description="The newer name of max_tokens, and what counts when both are given")] = (
        None
    )
    logprobs: bool | None = None
    top_logprobs: U32 | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    tool_prompt: Annotated[str | None, Meta(description="What tells the model of the tools where its template does not")] = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Further names the template may look at, as enable_thinking")
    ] = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[
        bool | None, Meta(description="Go on with the last message; null: when the assistant said it, as in TGI")
    ] = None
    truncate: Annotated[
        Literal["refuse", "oldest", "middle"] | None, Meta(description="Which messages may be left out when the prompt is too long")
    ] = None


class CompletionRequest(_Sampling, kw_only=True):
    prompt: Annotated[str | list[str | int | list[int]], Meta(description="A text, several, the ids of one, or of several")]
    suffix: str | None = None
    logprobs: U32 | None = None
    echo: bool | None = None
    best_of: Annotated[
        Unsigned | None, Meta(description="Make so many answers, tell the `n` of the highest mean logprob; not when streaming")
    ] = None


class ErrorObject(Struct):
    """`http_status_code` is TGI's field of errors in streams."""

    message: str
    type: str
    code: str
    param: str | None
    http_status_code: int


class OpenAIErrorResponse(Struct):
    """An error under /v1, as a body and as an event of a stream."""

    error: ErrorObject
    error_type: Annotated[str, Meta(description="TGI's word for it, as on the other routes")]


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TopLogprob(Struct):
    token: str
    logprob: float | None
    bytes: list[int] | None = None


class Logprob(Struct):
    token: str
    logprob: float | None
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = []


class Logprobs(Struct):
    content: list[Logprob]


class MadeFunction(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class MadeCall(Struct):
    id: str
    type: str
    function: MadeFunction


class DeltaCall(Struct):
    index: int
    function: MadeFunction
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Answer(Struct):
    """What the assistant said. `content` is null when it only called tools."""

    role: str
    content: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MadeCall] | UnsetType = UNSET


class Choice(Struct):
    index: int
    message: Answer
    logprobs: Logprobs | None
    finish_reason: ChatFinish
    origins: Annotated[list[Origin] | UnsetType, Meta(description="Of each token, when asked for")] = UNSET


class ChatCompletion(Struct, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage


class Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[DeltaCall] | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: Logprobs | None = None
    finish_reason: ChatFinish | None = None
    origin: Annotated[Origin | UnsetType, Meta(description="Of the token that brought this, when `origins` are asked for")] = UNSET


class ChatChunk(Struct, tag_field="object", tag="chat.completion.chunk"):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class TextLogprobs(Struct):
    """The older form, of completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: ChatFinish | None = None
    origin: Annotated[Origin | UnsetType, Meta(description="In a stream: of the token that brought this, when `origins` are asked for")] = (
        UNSET
    )
    origins: Annotated[list[Origin] | UnsetType, Meta(description="In a whole answer: of each token, when asked for")] = UNSET


class Completion(Struct, tag_field="object", tag="text_completion"):
    """Also each chunk of a stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelInfo(Struct):
    id: str
    object: str
    created: int
    owned_by: str


class Models(Struct):
    object: str
    data: list[ModelInfo]


class ChatTokens(Struct):
    tokenize_response: list[SimpleToken]
    templated_text: str
