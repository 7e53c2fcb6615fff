"""What the model says in a conformance run: a fixed job in the harness's own tools, decided by the prompt alone.

Promises: the reply depends on nothing but the conversation that the prompt shows; it is written in the model's own
format and fed to a real engine, which returns the log-probs that its weights give it (forced decoding).
"""

import json
from collections.abc import Sequence

import msgspec
from tokenizers import Tokenizer

from openforge.chat.chatml import CALL, CALLED, CLOSE, OPEN
from openforge.harnesses import ALL, Harness, find
from openforge.harnesses.harness import SCENARIOS, ToolUse, mark

LAST_WORD = "The notes are written. I am done."
ASIDE = "Notes in three lines"

# Each step: what is said, and the commands that are called for at once. White space and letters beyond ASCII are there
# to come back from the harness as they were.
STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("I begin with the first line:  größe.", ("printf 'größe ✓ 1\\n' > notes.txt",)),
    ("Two things at once.", ("echo two >> notes.txt", "ls -l /workspace >/dev/null")),
    ("", ("echo three >> notes.txt",)),
    ("I look at it.\n\n- once\n- \ttwice", ("cat notes.txt",)),
    ("And count.", ("wc -l < notes.txt",)),
)


class Shown(msgspec.Struct, frozen=True):
    """What a prompt shows: the texts of its turns by role, the last one open, and the names of its tools."""

    turns: tuple[tuple[str, str], ...]
    tools: frozenset[str]

    @property
    def replies(self) -> int:
        return sum(role == "assistant" for role, _ in self.turns) - 1


def read_prompt(text: str) -> Shown:
    """A prompt as the template of our models writes it."""
    turns = []
    for piece in text.split(OPEN)[1:]:
        role, _, content = piece.partition("\n")
        turns.append((role, content.removesuffix("\n").removesuffix(CLOSE)))
    return Shown(tuple(turns), frozenset(_tool_names(turns[0][1])) if turns else frozenset())


def _tool_names(system: str) -> list[str]:
    if "<tools>\n" not in system:
        return []
    listed = system.rpartition("<tools>\n")[2].partition("\n</tools>")[0]
    return [json.loads(line)["function"]["name"] for line in listed.splitlines()]


class Script:
    """The replies for every harness; the prompt's mark says which one asks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def reply(self, prompt: Sequence[int]) -> list[int]:
        """The ids of what the model says after `prompt`."""
        text = text_after(read_prompt(self._tokenizer.decode(list(prompt), skip_special_tokens=False)))
        return list(self._tokenizer.encode(text + CLOSE, add_special_tokens=False).ids)


def text_after(shown: Shown) -> str:
    """What is said next: a step of the job, or an aside where the job's tools are not offered."""
    harness = harness_of(shown)
    if harness is not None and harness.spoken is not None:
        return harness.spoken("\n".join(text for _, text in shown.turns))
    if harness is None or harness.shell("").name not in shown.tools:
        return ASIDE
    if shown.replies < len(STEPS):
        words, commands = STEPS[shown.replies]
        return _said(words, [harness.shell(command) for command in commands])
    return _said("", [harness.finish]) if harness.finish else LAST_WORD


def harness_of(shown: Shown) -> Harness | None:
    marked = (mark(harness.name, scenario) for harness in ALL for scenario in SCENARIOS)
    texts = "\n".join(text for _, text in shown.turns)
    found = next((known for known in marked if known in texts), None)
    return find(found.split()[1]) if found else None


def _said(words: str, calls: Sequence[ToolUse]) -> str:
    return "\n".join([*([words] if words else []), *map(_call, calls)])


def _call(use: ToolUse) -> str:
    """JSON as a model might write it: spaced unlike any library does."""
    arguments = json.dumps(use.arguments, ensure_ascii=False, separators=(",  ", " : "))
    return f'{CALL}\n{{"name": "{use.name}", "arguments": {arguments}}}\n{CALLED}'
