"""OpenVINO GenAI in a plain loop, for `bench peers`: run by the Python of its own environment, which has nothing of ours.

python openvino_loop.py MODEL        reads requests from stdin and answers on stdout, one JSON object a line, as `bare.py` does:

{"decode": 16, "context": 64, "steps": 128} → {"seconds": […]}   one for each step of 16 rows
{"prefill": 512}                            → {"seconds": […]}   one prompt up to its first token
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import openvino
import openvino_genai

WORDS = ("the", "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


class Loop:
    """Continuous batching without prefix cache, in bf16 where the processor has it."""

    def __init__(self, model: str) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = False
        self._pipe: Any = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})
        self._tokenizer = self._pipe.get_tokenizer()
        self._number = 0

    def decode(self, rows: int, context: int, steps: int) -> list[float]:
        """Seconds of each step after the prompts'."""
        for _ in range(rows):
            self._add(context, steps + 1)
        seconds = self._steps()
        return seconds[1:] if len(seconds) > steps else seconds

    def prefill(self, length: int) -> float:
        self._add(length, 1)
        return sum(self._steps())

    def _add(self, length: int, tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.ignore_eos = True
        self._number += 1
        self._handle = self._pipe.add_request(self._number, self._prompt(length), config)

    def _prompt(self, length: int) -> Any:
        """Ids of so many tokens, which differ from the first one on."""
        dice = random.Random(self._number)
        ids = self._tokenizer.encode(" ".join(dice.choices(WORDS, k=2 * length))).input_ids.data[0][:length]
        return openvino.Tensor(ids.reshape(1, -1).copy())

    def _steps(self) -> list[float]:
        seconds = []
        while self._pipe.has_non_finished_requests():
            began = time.perf_counter()
            self._pipe.step()
            seconds.append(time.perf_counter() - began)
        return seconds


def main() -> None:
    results = sys.stdout
    sys.stdout = sys.stderr
    loop = Loop(sys.argv[1])
    print(json.dumps({"ready": True}), file=results, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "decode" in request:
            answer = loop.decode(request["decode"], request["context"], request["steps"])
        else:
            answer = [loop.prefill(request["prefill"])]
        print(json.dumps({"seconds": answer}), file=results, flush=True)


if __name__ == "__main__":
    main()
