"""llama-index's LLMs for TGI: the old one, which asks `/info` first and then speaks through the `tgi` package (TGI's client under its later
name), and HuggingFaceInferenceAPI, which took its place and speaks through huggingface_hub.
"""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import scenarios
from huggingface_hub.errors import HfHubHTTPError
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.huggingface_api import HuggingFaceInferenceAPI
from llama_index.llms.text_generation_inference import TextGenerationInference
from tgi import Client
from tgi.errors import ValidationError

SAID = [ChatMessage(role="system", content="brief"), ChatMessage(role="user", content=scenarios.PROMPT)]


def model(url: str, **more: Any) -> TextGenerationInference:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TextGenerationInference(model_url=url, **{"temperature": 0.0, "max_tokens": 16, "timeout": scenarios.SECONDS, **more})


def check_the_server_is_known(url: str) -> None:
    told = model(url).metadata
    assert told.context_window == 2_000_000 and told.is_chat_model


def check_a_chat(url: str) -> None:
    answer = model(url).chat(SAID)
    assert answer.message.role == "assistant" and answer.message.content
    assert model(url).complete(scenarios.PROMPT).text


def check_a_chat_async(url: str) -> None:
    answer = asyncio.run(model(url).achat(SAID))
    assert answer.message.content == model(url).chat(SAID).message.content


def check_a_chat_refused(url: str) -> None:
    scenarios.refuses(ValidationError, "`top_p` must be", lambda: model(url).chat(SAID, top_p=3.0))


def check_tools_are_offered(url: str) -> None:
    def weather(place: str) -> str:
        """The weather at a place."""
        return place

    answer = model(url).chat_with_tools([FunctionTool.from_defaults(weather)], user_msg=scenarios.PROMPT, tool_choice="auto")
    assert answer.message.role == "assistant"


def check_tgis_later_client(url: str) -> None:
    client = Client(url, timeout=int(scenarios.SECONDS))
    whole = client.generate(scenarios.PROMPT, max_new_tokens=12)
    said = list(client.generate_stream(scenarios.PROMPT, max_new_tokens=12))
    assert whole.details.generated_tokens == len(said) == 12
    assert said[-1].generated_text == whole.generated_text == scenarios.generate(url, max_new_tokens=12)
    scenarios.refuses(ValidationError, "`truncate` must be", lambda: client.generate(scenarios.PROMPT, truncate=10**9))


def check_a_stream_given_up(url: str) -> None:
    with scenarios.left_behind(url):
        stream = Client(url, timeout=int(scenarios.SECONDS)).generate_stream(scenarios.PROMPT, max_new_tokens=10**6)
        next(stream)
        stream.close()


def newer(url: str, **more: Any) -> HuggingFaceInferenceAPI:
    return HuggingFaceInferenceAPI(
        model_name=url, **{"task": "conversational", **more}, temperature=0.5, num_output=16, timeout=scenarios.SECONDS
    )


def check_newer_a_chat_streamed_is_the_same(url: str) -> None:
    whole = newer(url).chat(SAID, seed=7)
    *_, last = newer(url).stream_chat(SAID, seed=7)
    assert last.message.content == whole.message.content != ""


def check_newer_a_chat_async(url: str) -> None:
    assert asyncio.run(newer(url).achat(SAID, seed=7)).message.content == newer(url).chat(SAID, seed=7).message.content


def check_newer_a_text(url: str) -> None:
    whole = newer(url, task="text-generation").complete(scenarios.PROMPT, seed=7)
    # As TGI, the server repeats the prompt before a text that is not streamed, and this client asks for nothing else.
    *_, last = newer(url, task="text-generation").stream_complete(scenarios.PROMPT, seed=7)
    assert last.text.replace("<s>", "") == whole.text.removeprefix(scenarios.PROMPT) != ""


def check_newer_a_chat_refused(url: str) -> None:
    scenarios.refuses(HfHubHTTPError, "`top_p` must be", lambda: newer(url).chat(SAID, top_p=3.0))


def check_newer_a_chat_given_up(url: str) -> None:
    with scenarios.left_behind(url):
        stream = newer(url).stream_chat(SAID, max_tokens=10**6)
        next(stream)
        stream.close()


if __name__ == "__main__":
    scenarios.main(dict(globals()))
