"""What the model says in a conformance run: a fixed job in the harness's own tools, decided by the prompt alone.

Promises: the reply depends on nothing but the conversation that the prompt shows; it is written in the model's own
format and fed to a real engine, which returns the log-probs that its weights give it (forced decoding).
"""

import json
import re
from collections.abc import Sequence

import msgspec
from tokenizers import Tokenizer

from openforge.chat.chatml import CALL, CALLED, CLOSE, OPEN, THINK, THOUGHT
from openforge.harnesses import ALL, Harness
from openforge.harnesses.harness import HELPER, ToolUse, mark

LAST_WORD = "The notes are written. I am done."
HELPED = "The second line is there."
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
THOUGHT_OF = "One step at a time:  größe ✓\n\n1. what is there?\n2.\twhat is missing?"
"""What is thought before each step, in a scenario with thinking."""
_JOB = 'Append the line "two" to /workspace/notes.txt with your shell tool, then say that it is there.'
_UNTIL_THERE = "timeout 60 sh -c 'until grep -qx two notes.txt; do sleep 0.2; done'"
_MUCH = "seq 1 1000"
"""A command whose output fills a small window."""
_SUMMARY_ASKED = re.compile("summary of (the|our|this) conversation|summarizes a conversation", re.IGNORECASE)
_SUMMARY_TAGS = ("state_snapshot",)
"""Where a harness takes a summary only between tags of its own."""
_SIGNS = tuple(commands[0].rpartition("\\n")[2] for _, commands in STEPS)
"""What is left of each step's first command however it is quoted."""
_DONE = re.compile(r"\(openforge-done (\d+)\)")


class Shown(msgspec.Struct, frozen=True):
    """What a prompt shows: the texts of its turns by role, the last one open, and the names of its tools."""

    turns: tuple[tuple[str, str], ...]
    tools: frozenset[str]

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self.turns)

    @property
    def told(self) -> str:
        """What others than the model said."""
        return "\n".join(text for role, text in self.turns if role != "assistant")

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
    found = job_of(shown)
    if found is None:
        return ASIDE
    harness, scenario = found
    if harness.spoken is not None:
        return harness.spoken(shown.text)
    if scenario == "compaction" and _done(shown) and _is_asked_to_sum_up(harness, shown):
        tag = next((tag for tag in _SUMMARY_TAGS if tag in shown.told), "summary")
        return f"<{tag}>\n{ASIDE}. {mark(harness.name, scenario)} (openforge-done {_done(shown)})\n</{tag}>"
    if harness.shell("").name not in shown.tools:
        return ASIDE
    if scenario == HELPER:
        return _helper_says(harness, shown)
    steps = _steps(harness, scenario, shown)
    done = _done(shown) if scenario == "compaction" else shown.replies
    if done < len(steps):
        return _said(*steps[done])
    return _said("", [harness.finish]) if harness.finish else LAST_WORD


def _helper_says(harness: Harness, shown: Shown) -> str:
    if not shown.replies:
        return _said("", [harness.shell("echo two >> notes.txt")])
    return _said("", [harness.helped]) if harness.helped else HELPED


Step = tuple[str, list[ToolUse]]


def _steps(harness: Harness, scenario: str, shown: Shown) -> list[Step]:
    """The job in this scenario."""
    steps: list[Step] = [(words, [harness.shell(command) for command in commands]) for words, commands in STEPS]
    match scenario:
        case "thinking":
            return [(f"{THINK}\n{THOUGHT_OF}\n{THOUGHT}\n\n{words}", calls) for words, calls in steps]
        case "compaction":
            return [*steps[:2], (steps[2][0], [*steps[2][1], harness.shell(_MUCH)]), *steps[3:]]
        case "delegation":
            assert harness.delegate is not None, f"{harness.name} delegates nothing"
            job = harness.delegate(f"{_JOB}\n{mark(harness.name, HELPER)}")
            wait = [harness.wait(shown.text)] if harness.wait else []
            return [
                steps[0],
                ("Somebody else writes the second.", [job]),
                ("", [*wait, harness.shell(_UNTIL_THERE)]),
                *steps[2:],
            ]
    return steps


def _is_asked_to_sum_up(harness: Harness, shown: Shown) -> bool:
    """Without the job's tools, or with the words of one that offers them then too."""
    asked = [text for role, text in shown.turns if role == "user"]
    return harness.shell("").name not in shown.tools or bool(_SUMMARY_ASKED.search(asked[-1]))


def _done(shown: Shown) -> int:
    """How many steps were said, as far as a prompt tells that may be the text of a conversation, hold a summary of its
    beginning, or both: up to the last one that stands in it, and up to the last summary."""
    summed_up = [int(number) for number in _DONE.findall(shown.text)]
    seen = [number for number, sign in enumerate(_SIGNS, start=1) if sign in shown.text]
    return max(summed_up + seen, default=0)


def job_of(shown: Shown) -> tuple[Harness, str] | None:
    """Whose job it is that somebody other than the model speaks of, and in which scenario. A summary may come back as
    the model's own words, and all that stood before it is gone."""
    for harness in ALL:
        for scenario in (*harness.scenarios, HELPER):
            where = shown.text if scenario == "compaction" else shown.told
            if mark(harness.name, scenario) in where:
                return harness, scenario
    return None


def _said(words: str, calls: Sequence[ToolUse]) -> str:
    return "\n".join([*([words] if words else []), *map(_call, calls)])


def _call(use: ToolUse) -> str:
    """JSON as a model might write it: spaced unlike any library does."""
    arguments = json.dumps(use.arguments, ensure_ascii=False, separators=(",  ", " : "))
    return f'{CALL}\n{{"name": "{use.name}", "arguments": {arguments}}}\n{CALLED}'
