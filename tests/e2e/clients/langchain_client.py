"""LangChain's two doors to TGI: HuggingFaceEndpoint (texts) and ChatHuggingFace (messages), with endpoint_url."""

from __future__ import annotations

import asyncio
from typing import Any

import scenarios
from huggingface_hub.errors import HfHubHTTPError, ValidationError
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint

SAID = [SystemMessage("brief"), HumanMessage(scenarios.PROMPT)]


SEED = {"seed": 7}
"""ChatHuggingFace sends what it is told with the call, not what its model was made with"""


def shown(pieces: list[str]) -> str:
    """hub's client passes special tokens of a stream on, as TGI sends them."""
    return "".join(pieces).replace("<s>", "")


def texts(url: str, **more: Any) -> HuggingFaceEndpoint:
    return HuggingFaceEndpoint(endpoint_url=url, seed=7, **{"max_new_tokens": 16, **more})


def chat(url: str, **more: Any) -> ChatHuggingFace:
    return ChatHuggingFace(llm=texts(url), model_id="tgi", **{"max_tokens": 16, **more})


def check_a_text_is_the_servers(url: str) -> None:
    llm = texts(url)
    sampling = {"do_sample": False, "seed": 7, "top_k": 10, "top_p": 0.95, "typical_p": 0.95, "temperature": 0.8}
    assert llm.invoke(scenarios.PROMPT) == scenarios.generate(url, max_new_tokens=16, **sampling)


def check_a_text_streamed_is_the_same(url: str) -> None:
    llm = texts(url)
    whole = llm.invoke(scenarios.PROMPT)
    assert len(pieces := list(llm.stream(scenarios.PROMPT))) > 1
    assert shown(pieces) == whole


def check_texts_async(url: str) -> None:
    async def ask() -> tuple[str, str]:
        llm = texts(url)
        return await llm.ainvoke(scenarios.PROMPT), shown([piece async for piece in llm.astream(scenarios.PROMPT)])

    whole, streamed = asyncio.run(ask())
    assert whole == streamed == texts(url).invoke(scenarios.PROMPT)


def check_a_stop_is_stripped_from_the_end(url: str) -> None:
    whole = texts(url).invoke(scenarios.PROMPT)
    stop = whole[5:7]
    assert texts(url, stop_sequences=[stop]).invoke(scenarios.PROMPT) == whole[: whole.find(stop)]


def check_a_text_refused(url: str) -> None:
    scenarios.refuses(ValidationError, "`truncate` must be", lambda: texts(url, truncate=10**9).invoke(scenarios.PROMPT))


def check_a_text_given_up(url: str) -> None:
    with scenarios.left_behind(url):
        stream = texts(url, max_new_tokens=10**6).stream(scenarios.PROMPT)
        next(stream)
        stream.close()


def check_a_chat(url: str) -> None:
    answer = chat(url).invoke(SAID, **SEED)
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == 16
    assert answer.response_metadata["finish_reason"] == "length"
    streamed = "".join(str(piece.content) for piece in chat(url).stream(SAID, **SEED))
    assert streamed == answer.content != ""


def check_a_chat_async(url: str) -> None:
    async def ask() -> tuple[str, str]:
        whole = await chat(url).ainvoke(SAID, **SEED)
        return str(whole.content), "".join([str(piece.content) async for piece in chat(url).astream(SAID, **SEED)])

    whole, streamed = asyncio.run(ask())
    assert whole == streamed != ""


def check_a_chat_refused(url: str) -> None:
    scenarios.refuses(HfHubHTTPError, "`top_p` must be", lambda: chat(url).invoke(SAID, top_p=3.0))


def check_a_chat_given_up(url: str) -> None:
    with scenarios.left_behind(url):
        stream = chat(url, max_tokens=10**6).stream(SAID)
        next(stream)
        stream.close()


if __name__ == "__main__":
    scenarios.main(dict(globals()))
