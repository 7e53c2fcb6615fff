"""A whole agent in thirty lines, on the `openai` client: the harness of the tests, and one to copy.

It asks the model, runs the first bash block of each reply (or its tool calls) in the current directory,
shows what came out, and ends at a reply without a command or after AGENT_TURNS replies.
"""

import json
import os
import re
import subprocess
import sys
from typing import Any

from openai import OpenAI

SYSTEM = "You work in a Linux shell. Give one bash command in each reply; when the task is done, give none."
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH = {"type": "function", "function": {"name": "bash", "description": "Run a command", "parameters": PARAMETERS}}
BLOCK = re.compile(r"```(?:bash|sh)?[ \t]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)


def run(command: str) -> str:
    try:
        done = subprocess.run(["bash", "-c", command], stdout=-1, stderr=-2, timeout=30, errors="replace", check=False)
    except subprocess.TimeoutExpired:
        return "Timed out after 30 seconds."
    return f"Exit code {done.returncode}. Output:\n{done.stdout[:4000]}"


def results(answer: dict[str, Any]) -> list[Any]:
    """The messages that answer the commands of a reply."""
    if calls := answer.get("tool_calls"):
        return [{"role": "tool", "tool_call_id": call["id"], "content": called(call)} for call in calls]
    block = BLOCK.search(answer.get("content") or "")
    return [{"role": "user", "content": run(block[1])}] if block else []


def called(call: dict[str, Any]) -> str:
    try:
        return run(str(json.loads(call["function"]["arguments"])["command"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"The call is broken: {error!r}"


def main(instruction: str) -> None:
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]
    options: dict[str, Any] = {"tools": [BASH]} if os.environ.get("AGENT_TOOLS") else {}
    for _ in range(int(os.environ.get("AGENT_TURNS", "4"))):
        reply = client.chat.completions.create(model=os.environ["AGENT_MODEL"], messages=messages, **options)
        answer = reply.choices[0].message.model_dump(exclude_none=True)
        new = results(answer)
        if not new:
            return
        messages += [answer, *new]


if __name__ == "__main__":
    main(sys.argv[1])
