"""OpenAI's client and the hub's chat client, unchanged, against a real server process."""

from __future__ import annotations

import openai
import pytest
import text_generation
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub import errors as hub_errors
from text_generation import errors as tgi_errors

from tests.e2e.server import Server

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*Pydantic.*")
MESSAGES = [{"role": "user", "content": "the quick brown hello 한글 🧵"}]


def client(server: Server, **more: object) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=30, max_retries=0, **more)  # type: ignore[arg-type]


def test_chat_whole_and_streamed_say_the_same(server: Server) -> None:
    ask = client(server).chat.completions
    whole = ask.create(model="tgi", messages=MESSAGES, max_tokens=20, seed=5, n=2, stop="zzz", top_p=1, logit_bias={"30": -100})
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    assert whole.usage is not None and whole.usage.completion_tokens == 40 and whole.id.startswith("chatcmpl-")
    texts = ["", ""]
    usages = []
    with ask.create(
        model="tgi",
        messages=MESSAGES,
        max_tokens=20,
        seed=5,
        n=2,
        stop="zzz",
        top_p=1,
        logit_bias={"30": -100},
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            usages += [chunk.usage] if chunk.usage else []
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices] and usages == [whole.usage]


async def test_chat_async_and_given_up(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=30) as asked:
        stream = await asked.chat.completions.create(model="tgi", messages=MESSAGES, max_tokens=200, stream=True)
        async for _ in stream:
            break
        await stream.close()
        whole = await asked.chat.completions.create(model="tgi", messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2)
        likely = whole.choices[0].logprobs
        assert likely is not None and likely.content is not None and len(likely.content) == 3
        assert all(len(one.top_logprobs) >= 2 and one.logprob <= 0 for one in likely.content)


def test_completions(server: Server) -> None:
    whole = client(server).completions.create(model="tgi", prompt=["hello", "the quick"], max_tokens=6, seed=1)
    assert [choice.index for choice in whole.choices] == [0, 1]
    said = ["", ""]
    for chunk in client(server).completions.create(model="tgi", prompt=["hello", "the quick"], max_tokens=6, seed=1, stream=True):
        for choice in chunk.choices:
            said[choice.index] += choice.text
    assert said == [choice.text for choice in whole.choices]


def test_models(server: Server) -> None:
    listed = client(server).models.list().data
    assert len(listed) == 1 and client(server).models.retrieve(listed[0].id).id == listed[0].id


def test_errors_have_their_classes(server: Server) -> None:
    ask = client(server)
    with pytest.raises(openai.UnprocessableEntityError, match="`n` must be") as refused:
        ask.chat.completions.create(model="tgi", messages=MESSAGES, n=0)
    assert (refused.value.code, refused.value.type) == ("validation", "invalid_request_error")
    with pytest.raises(openai.UnprocessableEntityError, match="top_logprobs"):
        ask.chat.completions.create(model="tgi", messages=MESSAGES, logprobs=True, top_logprobs=99, stream=True)
    with pytest.raises(openai.UnprocessableEntityError, match="must be <=") as refused:
        ask.completions.create(model="tgi", prompt="x " * 4000)
    assert refused.value.code == "context_length_exceeded" and refused.value.request_id
    with pytest.raises(openai.NotFoundError, match="is not served"):
        ask.embeddings.create(model="tgi", input="x")


async def test_the_hubs_client_chats(server: Server) -> None:
    ask = InferenceClient(server.url, timeout=30)
    whole = ask.chat_completion(MESSAGES, max_tokens=12, seed=3)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in ask.chat_completion(MESSAGES, max_tokens=12, seed=3, stream=True))
    assert said == whole.choices[0].message.content and whole.usage.completion_tokens == 12
    again = await AsyncInferenceClient(server.url, timeout=30).chat_completion(MESSAGES, max_tokens=12, seed=3)
    assert again.choices[0].message.content == said
    for streamed in (False, True):
        with pytest.raises(hub_errors.HfHubHTTPError, match="`top_p` must be") as refused:
            ask.chat_completion(MESSAGES, top_p=3, stream=streamed)
        assert refused.value.response.status_code == 422


def test_tgis_client_finds_its_exceptions_on_both_kinds_of_routes(server: Server) -> None:
    asked = text_generation.Client(server.url, timeout=30)
    with pytest.raises(tgi_errors.ValidationError, match="`top_p` must be"):
        asked.chat(messages=[text_generation.types.Message(role="user", content="x")], top_p=3)
    with pytest.raises(tgi_errors.ValidationError, match="must be <="):
        asked.generate("x " * 4000)
