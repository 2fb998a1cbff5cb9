"""A user's turn as the target's own tokens: its chat template, cut open where the turn stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TURN = "\u2063turn\u2063"
"""stands for the user's turn while the template is applied; nobody writes it"""


class Frame:
    """What stands before and behind a user's turn. `folder` has the tokenizer. A model without a chat template gets turns plainly, with a
    line break behind."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        if self.tokenizer.chat_template:
            message = [{"role": "user", "content": TURN}]
            text = str(self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
            before, _, behind = text.partition(TURN)
        else:
            before, behind = self.tokenizer.bos_token or "", "\n"
        self._before: str = before
        self._behind: str = behind

    def begun(self, turn: str) -> list[int]:
        """Ids of a turn that is still being written."""
        return self._ids(self._before + turn)

    def asked(self, turn: str) -> list[int]:
        """Ids of a turn that waits for its answer."""
        return self._ids(self._before + turn + self._behind)

    def text(self, ids: list[int]) -> str:
        """Generated ids as text, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))
