"""The prompts of a speculation sweep: five kinds of text in which guesses hold seldom, often or nearly always.

Without files they are made here, of words of our own: open questions, small programs, school mathematics, long code to be changed
(functions of this package), and texts to be repeated. A folder of NAME.jsonl files takes their place, for MT-Bench, HumanEval and the like.
Knows nothing of servers.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from forerun.bench import prompts

MOST = 96
"""prompts made for each kind; 32 streams need 80"""

PLAIN_BAR, COPY_BAR = 1.2, 2.2
_WANTED = {"chat": PLAIN_BAR, "mt-bench": PLAIN_BAR, "code": PLAIN_BAR, "humaneval": PLAIN_BAR, "copy": COPY_BAR}
"""speed over plain decoding that one stream must reach with a drafter that needs no model"""


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """`wanted`: the bar at one stream, 0 = none but not to lose."""

    name: str
    prompts: Sequence[str]
    wanted: float = 0.0


def from_folder(folder: Path, names: Sequence[str] = ()) -> list[Workload]:
    """NAME.jsonl for each of `names`, or every such file. Raises FileNotFoundError, or PromptError for what is no prompt file."""
    found = sorted(path.stem for path in folder.glob("*.jsonl"))
    if not found:
        raise FileNotFoundError(f"{folder} has no NAME.jsonl files")
    missing = set(names) - set(found)
    if missing:
        raise FileNotFoundError(f"{folder} has no {', '.join(sorted(missing))}; it has {', '.join(found)}")
    return [Workload(name, prompts.read(folder / f"{name}.jsonl"), _WANTED.get(name, 0.0)) for name in names or found]


def made(names: Sequence[str] = ()) -> list[Workload]:
    """The five kinds of our own, or those of `names`. The same prompts in every run of this version."""
    unknown = set(names) - set(_KINDS)
    if unknown:
        raise ValueError(f"there is no workload {', '.join(sorted(unknown))}; there are {', '.join(_KINDS)} (or give --prompts FOLDER)")
    return [Workload(name, list(itertools.islice(_KINDS[name](), MOST)), _WANTED.get(name, 0.0)) for name in names or _KINDS]


_TOPICS = (
    "a lighthouse keeper who has never seen the sea calm|learning to swim as an adult|why bread rises|the first day in a new town|"
    "how to prepare for a job interview|keeping bees on a roof|the history of the bicycle|saving water in a garden|"
    "a friendship between a baker and a watchmaker|how rainbows come about|planning a week in the mountains|"
    "why leaves change their colour|teaching a child to read|the advantages of night trains|how to repair an old chair|"
    "a letter found in a library book|choosing a second-hand bicycle|why the moon has phases|cooking for ten guests|"
    "the sound of a city at five in the morning|how vaccines work|starting a neighbourhood library|what makes a good apology|"
    "how salt changed trade"
)
_FORMS = (
    "Write a short story about {}.",
    "Explain {} to a curious ten-year-old.",
    "Give me five pieces of advice about {}, each with a reason.",
    "Write a friendly blog post about {}.",
    "What should I know about {}? Answer in a few paragraphs.",
    "Write a dialogue between two friends who disagree about {}.",
    "Draft an e-mail to a colleague about {}.",
    "List the advantages and disadvantages of {}, then say what you would do.",
)


def _chat() -> Iterator[str]:
    topics = _TOPICS.split("|")
    for number in itertools.count():
        yield _FORMS[(number + number // len(topics)) % len(_FORMS)].format(topics[number % len(topics)])


_TASKS = (
    "running_maximum|values: list[int]) -> list[int]|the largest of the numbers seen so far, at each place of the list",
    "count_vowels|text: str) -> int|how many vowels the text has, in either case",
    "merge_sorted|left: list[int], right: list[int]) -> list[int]|both sorted lists merged into one sorted list",
    "is_palindrome|text: str) -> bool|whether the text reads the same backwards when spaces and case are ignored",
    "word_lengths|text: str) -> dict[str, int]|each word of the text with its length",
    "second_largest|values: list[int]) -> int|the second largest of the different numbers in the list",
    "rotate|values: list[int], steps: int) -> list[int]|the list rotated to the right by so many steps",
    "flatten|nested: list[list[int]]) -> list[int]|all numbers of the inner lists in order",
    "digit_sum|number: int) -> int|the sum of the decimal digits of a number",
    "common_prefix|words: list[str]) -> str|the longest beginning that all words share",
    "moving_average|values: list[float], width: int) -> list[float]|the mean of each window of so many values",
    "to_binary|number: int) -> str|a number of zero or more in base two",
    "remove_duplicates|values: list[int]) -> list[int]|the list without repetitions, in the order of first appearance",
    "primes_below|limit: int) -> list[int]|all prime numbers below a limit",
    "transpose|rows: list[list[int]]) -> list[list[int]]|the matrix with rows and columns exchanged",
    "balanced|text: str) -> bool|whether every bracket of the text is closed by one of its kind in the right order",
    "group_by_length|words: list[str]) -> dict[int, list[str]]|the words grouped by how long they are",
    "celsius|fahrenheit: float) -> float|a temperature in degrees Celsius, rounded to one decimal",
    "fibonacci|count: int) -> list[int]|the first so many Fibonacci numbers",
    "most_common|text: str) -> str|the letter that occurs most often in the text",
    "binary_search|values: list[int], wanted: int) -> int|where a number stands in a sorted list, or -1",
    "anagrams|left: str, right: str) -> bool|whether two words have the same letters",
    "parse_pairs|line: str) -> dict[str, str]|the pairs of a line like 'a=1;b=2'",
    "caesar|text: str, shift: int) -> str|the text with each letter moved by so many places in the alphabet",
)


def _code() -> Iterator[str]:
    asked = (
        'Write a solution to the following problem:\n```python\ndef {name}({signature}:\n    """Return {result}."""\n```',
        "Write a Python function `{name}({signature}` that returns {result}. Add a docstring and three tests with assert.",
        "Write a Python class with a method `{name}({signature}` that returns {result}, and a main function that prints two examples.",
        "Write a Python function `{name}({signature}` that returns {result}. Explain each line.",
    )
    for number in itertools.count():
        name, signature, result = _TASKS[number % len(_TASKS)].split("|")
        yield asked[(number // len(_TASKS)) % len(asked)].format(name=name, signature=signature, result=result)


_SUMS = (
    "{a} sells {n} jars of honey at {p} dollars each and {m} candles at {q} dollars each. {a} spends {r} dollars on the stall. "
    "How much does {a} earn?",
    "A train covers {n} kilometres in the first hour and {m} kilometres in each of the next {r} hours. How far does it travel in all?",
    "{a} reads {n} pages a day for {r} days, then {m} pages a day for {q} days. How many pages does {a} read?",
    "A tank holds {n}00 litres. {a} fills in {m} litres a minute while {q} litres a minute leak out. How much is in it after {r} minutes?",
    "{a} has {n} stickers and gives {q} to each of {r} friends, then buys {m} more. How many stickers does {a} have now?",
    "A baker makes {n} trays of {m} rolls. {q} rolls burn on each tray, and {r} rolls are given away. How many are left to sell?",
)
_PEOPLE = ("Ada", "Bruno", "Chiara", "Deniz", "Emil", "Farah", "Goran", "Hanna", "Ivo", "Jun")


def _maths() -> Iterator[str]:
    dice = random.Random(1)
    for number in itertools.count():
        values = {"n": dice.randint(40, 90), "m": dice.randint(12, 40), "p": dice.randint(3, 9), "q": dice.randint(2, 5)}
        text = _SUMS[number % len(_SUMS)].format(a=dice.choice(_PEOPLE), r=dice.randint(2, 6), **values)
        yield f"{text}\nReason step by step and write the answer on the last line."


_CHANGES = (
    "It raises an exception when its argument is empty.",
    "It is slow for large inputs, since it does some of its work twice.",
    "Its names are hard to understand, and it has no comments.",
    "It does not say what went wrong when its input is not valid.",
)


def _repair() -> Iterator[str]:
    for number, source in enumerate(itertools.cycle(_functions())):
        yield f"{_CHANGES[number % len(_CHANGES)]}\n```python\n{source}\n```\nWrite the whole function again with this repaired."


def _functions() -> list[str]:
    """Functions of this package, 12 to 45 lines long, those of a file not next to each other."""
    found: list[str] = []
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        found += [ast.get_source_segment(text, node) or "" for node in nodes if 12 <= (node.end_lineno or 0) - node.lineno + 1 <= 45]
    random.Random(2).shuffle(found)
    return found


def _copy() -> Iterator[str]:
    asked = (
        "Repeat the following text exactly, word for word, and add nothing:\n\n{}",
        "Rewrite the following text with a title above it and every sentence unchanged:\n\n{}",
        "Correct the spelling of the following text and change nothing else:\n\n{}",
    )
    sentences = [text.split("\n")[0] for text in itertools.islice(_maths(), 200)]
    for number in itertools.count():
        yield asked[number % len(asked)].format(" ".join(sentences[(2 * number) % 200 : (2 * number) % 200 + 2]))


_KINDS: dict[str, Callable[[], Iterator[str]]] = {"chat": _chat, "code": _code, "maths": _maths, "repair": _repair, "copy": _copy}
