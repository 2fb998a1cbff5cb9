"""The official clients, unchanged, against a real server process: streamed and not, with details, and their errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import text_generation
from huggingface_hub import InferenceClient
from huggingface_hub import errors as hub_errors
from text_generation import errors as tgi_errors

from tests.e2e.server import Server

GREEDY = {"max_new_tokens": 20, "return_full_text": False}
PROMPT = "the quick brown hello 한글 🧵"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*Pydantic.*")


def old(server: Server) -> text_generation.Client:
    return text_generation.Client(server.url, timeout=30)


def new(server: Server) -> InferenceClient:
    return InferenceClient(server.url, timeout=30)


def streamed(server: Server, **asked: Any) -> str:
    """The text a streaming client shows: the client passes special tokens on, the text has none."""
    client = new(server)
    said = client.text_generation(PROMPT, stream=True, details=True, **asked)
    return "".join(event.token.text for event in said if not event.token.special)


def test_text_generation(server: Server) -> None:
    answer = old(server).generate(PROMPT, max_new_tokens=20, decoder_input_details=True, top_n_tokens=3)
    details = answer.details
    assert details.generated_tokens == len(details.tokens) == 20
    assert details.finish_reason.value == "length"
    assert details.seed is None
    assert details.prefill[0].logprob is None
    assert all(token.logprob is not None and token.logprob <= 0 for token in details.prefill[1:])
    assert details.top_tokens is not None and len(details.top_tokens) == 20
    assert "".join(token.text for token in details.tokens if not token.special) == answer.generated_text


def test_text_generation_stream(server: Server) -> None:
    client = old(server)
    said = list(client.generate_stream(PROMPT, max_new_tokens=20))
    assert [event.generated_text is None for event in said] == [True] * 19 + [False]
    assert "".join(event.token.text for event in said if not event.token.special) == said[-1].generated_text
    assert said[-1].details is not None and said[-1].details.generated_tokens == 20
    assert client.generate(PROMPT, max_new_tokens=20).generated_text == said[-1].generated_text


async def test_text_generation_async(server: Server) -> None:
    client = text_generation.AsyncClient(server.url, timeout=30)
    answers = await asyncio.gather(*(client.generate(PROMPT, max_new_tokens=15) for _ in range(4)))
    assert len({answer.generated_text for answer in answers}) == 1
    said = [event async for event in client.generate_stream(PROMPT, max_new_tokens=15)]
    assert said[-1].generated_text == answers[0].generated_text


def test_text_generation_all_parameters(server: Server) -> None:
    asked: dict[str, Any] = {
        "do_sample": True, "max_new_tokens": 10, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "return_full_text": True,
        "stop_sequences": ["never said"], "temperature": 0.5, "top_p": 0.9, "top_k": 10, "truncate": 5, "typical_p": 0.9,
        "watermark": True, "seed": 7,
    }  # fmt: skip
    first, second = (old(server).generate(PROMPT, **asked) for _ in range(2))
    assert first.generated_text == second.generated_text
    assert first.generated_text.startswith(PROMPT)
    assert first.details.seed == 7


def test_text_generation_best_of(server: Server) -> None:
    details = old(server).generate(PROMPT, max_new_tokens=8, best_of=2, do_sample=True).details
    assert details.best_of_sequences is not None and len(details.best_of_sequences) == 1

    def mean(tokens: list[Any]) -> float:
        return sum(token.logprob for token in tokens) / len(tokens)

    assert mean(details.tokens) >= mean(details.best_of_sequences[0].tokens)


def test_text_generation_errors(server: Server) -> None:
    with pytest.raises(tgi_errors.ValidationError, match="must be <="):
        old(server).generate("x " * 4000, max_new_tokens=1)
    with pytest.raises(tgi_errors.ValidationError):
        list(old(server).generate_stream("x " * 4000, max_new_tokens=1))


def test_hub_text_generation(server: Server) -> None:
    client = new(server)
    text = client.text_generation(PROMPT, **GREEDY)
    assert client.text_generation(PROMPT, max_new_tokens=20) == PROMPT + text
    assert client.text_generation(PROMPT, max_new_tokens=20, return_full_text=True) == PROMPT + text
    assert streamed(server, **GREEDY) == text
    assert len(list(client.text_generation(PROMPT, stream=True, **GREEDY))) == 20


def test_hub_text_generation_details(server: Server) -> None:
    client = new(server)
    answer = client.text_generation(
        PROMPT, max_new_tokens=12, details=True, decoder_input_details=True, top_n_tokens=2, return_full_text=False
    )
    assert answer.details is not None
    assert answer.details.generated_tokens == len(answer.details.tokens) == 12
    assert len(answer.details.prefill) > 5
    said = list(client.text_generation(PROMPT, max_new_tokens=12, details=True, stream=True, return_full_text=False))
    assert said[-1].generated_text == answer.generated_text
    assert said[-1].details is not None
    assert (said[-1].details.finish_reason, said[-1].details.generated_tokens) == ("length", 12)
    assert [event.token.id for event in said] == [token.id for token in answer.details.tokens]


def test_hub_seeds(server: Server) -> None:
    client = new(server)
    one, again, other = (
        client.text_generation(PROMPT, max_new_tokens=20, do_sample=True, seed=seed, return_full_text=False) for seed in (1, 1, 2)
    )
    assert one == again == streamed(server, max_new_tokens=20, do_sample=True, seed=1)
    assert one != other


def test_hub_errors(server: Server) -> None:
    with pytest.raises(hub_errors.ValidationError, match="top_n_tokens"):
        new(server).text_generation(PROMPT, top_n_tokens=50)
    client = new(server)
    with pytest.raises((hub_errors.ValidationError, hub_errors.HfHubHTTPError)):
        list(client.text_generation(PROMPT, top_n_tokens=50, stream=True))


def test_hub_endpoint_info(server: Server) -> None:
    client = InferenceClient(server.url, timeout=30, provider="hf-inference")
    info = client.get_endpoint_info()
    assert info["max_input_tokens"] < info["max_total_tokens"]
    assert client.health_check()


@pytest.mark.parametrize("stop_at", [1, 3, 6])
def test_stop_in_the_middle_of_what_it_says(server: Server, stop_at: int) -> None:
    client = new(server)
    whole = client.text_generation(PROMPT, **GREEDY)
    stop = whole[stop_at : stop_at + 2]
    cut = client.text_generation(PROMPT, stop=[stop], **GREEDY)
    assert cut == whole[: whole.find(stop) + len(stop)]
    assert streamed(server, stop=[stop], **GREEDY) == cut
