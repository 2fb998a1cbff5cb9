"""How invented conversations begin: the first words of a user's turn, which the target then finishes itself.

An opening says what kind of text will come (chat, code, sums, passages to be copied or summarised, reports of errors), not what it is
about. Prompts that acceptance is measured on must not be here.
"""

from __future__ import annotations

import dataclasses
import random


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """`text`: the turn's first words. `limit`: tokens the target adds to them. `closing`: what is put behind."""

    text: str
    limit: int = 48
    closing: str = ""


CHAT = """
Explain | Explain to a child | Write a short story about | Give me a list of | Give me ten ideas for | How does | How do I | How can I |
What are the main differences between | What are the advantages of | Describe | Summarise | Write a letter to | Plan a | Compare | Tell
me about | Why is | Why do | Why does | What should I know about | Write a poem about | Help me with | Can you | Could you please | I
want to learn | I am trying to | I feel | I need advice on | What is | What is the meaning of | What happened | What would happen if |
Who was | Who invented | When did | Where can I | Write an email to | Write a speech about | Write an essay on | Write a blog post about
| Write a product description for | Write a dialogue between | Write a review of | Write a recipe for | Create a | Design a | Suggest |
Recommend | Imagine that | Pretend that you are | You are a | In the history of | In biology, | In physics, | In economics, | In
chemistry, | Discuss | Define | Outline the steps | My | Our | The | Is it true that | Should I | Do you | Translate into French: |
Correct the grammar: | Rewrite this sentence more politely: | Which
"""

CODE = (
    Opening("Write a Python function that"),
    Opening("Write a function to"),
    Opening("Write a Python function to find"),
    Opening("Write a Python program that"),
    Opening("Write a class in Python that"),
    Opening("Write a SQL query that"),
    Opening("Write a JavaScript function that"),
    Opening("Write a shell script that"),
    Opening("How do I, in Python,"),
    Opening("What does this code do?\n```python\n", 96, "\n```"),
    Opening("Complete this function.\n```python\ndef ", 96, "\n```"),
    Opening("Implement the function below.\n```python\nfrom typing import List\n\n\ndef ", 110, "\n```"),
    Opening("Finish the program so that the examples hold:\n```python\ndef ", 110, "\n```"),
    Opening("Find the error in this program:\n```python\n", 96, "\n```"),
    Opening("Add comments to this code:\n```python\ndef ", 96, "\n```"),
    Opening("Write tests for this function:\n```python\ndef ", 80, "\n```"),
)

SUMS = (
    Opening("A farmer has", 64, "\nThink step by step and give the final answer at the end."),
    Opening("A shop sells", 64, "\nThink step by step and give the final answer at the end."),
    Opening("A train travels", 56, "\nShow your work."),
    Opening("Anna has twice as many", 56, "\nReason step by step. Put the result in \\boxed{}."),
    Opening("Tom buys", 64, "\nReason step by step. Put the result in \\boxed{}."),
    Opening("There are", 64, "\nReason step by step. Put the result in \\boxed{}."),
    Opening("In a class of", 64, "\nReason step by step. Put the result in \\boxed{}."),
    Opening("Maria earns", 64, "\nHow much is it in all? Show every step."),
    Opening("Solve for x:", 32),
    Opening("Calculate", 32),
    Opening("What is the value of", 32, "\nReason step by step. Put the result in \\boxed{}."),
    Opening("Find the number of", 40, "\nReason step by step. Put the result in \\boxed{}."),
    Opening("Prove that", 40),
    Opening("If a rectangle has", 40, "\nShow your work."),
    Opening("Each", 64, "\nReason step by step. Put the result in \\boxed{}."),
)

PASSAGES = (
    Opening("Copy this text word for word:\n\nThe", 110),
    Opening("Say exactly the same again, without any change:\n\n", 110),
    Opening("Write this text again and correct only the spelling:\n\nIn", 110),
    Opening("Summarise this in two sentences:\n\nThe", 130),
    Opening("What are the key points of this text?\n\nA", 130),
    Opening("List the names and numbers in this text:\n\nIn", 110),
    Opening("Turn this paragraph into a list:\n\nTo", 110),
    Opening("Text: On", 120, "\n\nQuestion: What is the text about?"),
    Opening("Make this text shorter:\n\nWhen", 110),
)

REPORTS = (
    Opening("When I run this code I get an error:\n```python\nimport", 120, "\n```\nHow can I fix it?"),
    Opening("I found a bug in a Python library.\nDescription\n", 130, "\n\nPlease explain how to fix it."),
    Opening("Issue:", 130, "\n\nPlease suggest a fix."),
    Opening("Traceback (most recent call last):\n  File", 110, "\n\nWhat is wrong here?"),
    Opening("The documentation says that the method", 110, "\n\nHow should this be changed?"),
)

KINDS: tuple[tuple[float, tuple[Opening, ...]], ...] = (
    (0.40, tuple(Opening(" ".join(text.split())) for text in CHAT.split("|"))),
    (0.20, CODE),
    (0.18, SUMS),
    (0.12, PASSAGES),
    (0.10, REPORTS),
)
"""How often each kind of text is wanted."""


def choose(dice: random.Random) -> Opening:
    (kind,) = dice.choices([openings for _, openings in KINDS], [weight for weight, _ in KINDS])
    return dice.choice(kind)
