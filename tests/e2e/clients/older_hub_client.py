"""huggingface_hub before 1.0 (on requests instead of httpx), which LangChain and llama-index still ask for."""

from __future__ import annotations

import asyncio

import scenarios
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError, ValidationError

SAID = [{"role": "user", "content": scenarios.PROMPT}]


def client(url: str) -> InferenceClient:
    return InferenceClient(url, timeout=scenarios.SECONDS)


def check_texts(url: str) -> None:
    plain = scenarios.generate(url, max_new_tokens=12)
    assert client(url).text_generation(scenarios.PROMPT, max_new_tokens=12, return_full_text=False) == plain
    stream = client(url).text_generation(scenarios.PROMPT, max_new_tokens=12, stream=True, details=True, return_full_text=False)
    assert list(stream)[-1].generated_text == plain


def check_chats(url: str) -> None:
    whole = client(url).chat_completion(SAID, max_tokens=12, seed=3)
    pieces = client(url).chat_completion(SAID, max_tokens=12, seed=3, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content


def check_chats_async(url: str) -> None:
    async def ask() -> str:
        async with AsyncInferenceClient(url, timeout=scenarios.SECONDS) as asked:
            return "".join(
                [
                    piece.choices[0].delta.content or ""
                    async for piece in await asked.chat_completion(SAID, max_tokens=12, seed=3, stream=True)
                ]
            )

    assert asyncio.run(ask()) == client(url).chat_completion(SAID, max_tokens=12, seed=3).choices[0].message.content


def check_refusals(url: str) -> None:
    scenarios.refuses(ValidationError, "`truncate` must be", lambda: client(url).text_generation(scenarios.PROMPT, truncate=10**9))
    scenarios.refuses(HfHubHTTPError, "`top_p` must be", lambda: client(url).chat_completion(SAID, top_p=3.0))


def check_streams_given_up(url: str) -> None:
    with scenarios.left_behind(url):
        stream = client(url).text_generation(scenarios.PROMPT, max_new_tokens=10**6, stream=True)
        next(iter(stream))
        stream.close()
    with scenarios.left_behind(url):
        chat = client(url).chat_completion(SAID, max_tokens=10**6, stream=True)
        next(iter(chat))
        chat.close()


if __name__ == "__main__":
    scenarios.main(dict(globals()))
