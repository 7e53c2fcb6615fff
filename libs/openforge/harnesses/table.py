"""All harnesses, as data: versions, what their tools are called, and what each is known to do to its conversations."""

import json
import re
from typing import Any

from openforge.harnesses import starts
from openforge.harnesses.harness import Habits, Harness, Npm, Pip, ToolUse, UnknownHarness


def find(name: str) -> Harness:
    """Raises `UnknownHarness`."""
    for harness in ALL:
        if harness.name == name:
            return harness
    known = ", ".join(harness.name for harness in ALL)
    raise UnknownHarness(f"harness {name!r} is not in the table: choose from {known}")


def _shell(name: str, argument: str = "command") -> Any:
    return lambda command: ToolUse(name, {argument: command})


def _browse(prompt: str) -> str:
    """browser-use's model answers in JSON: open the page, press its three buttons, wait, report."""
    steps = re.findall(r"Step(\d+) maximum", prompt)
    step = int(steps[-1]) if steps else 1
    actions: dict[int, Any] = {1: {"navigate": {"url": "http://127.0.0.1:8765/", "new_tab": False}}}
    for number, button in enumerate(("first", "second", "third"), start=2):
        found = re.findall(rf"\[(\d+)\]<button[^>]*>\s*{button}\b", prompt)
        actions[number] = {"click": {"index": int(found[-1]) if found else 1}}
    actions[5] = {"wait": {"seconds": 1}}
    done = {"done": {"text": "größe ✓ 1\ntwo\nthree", "success": True, "files_to_display": []}}
    said = {"evaluation_previous_goal": "Well.", "memory": f"Step {step}.", "next_goal": "Go on."}
    return json.dumps({**said, "action": [actions.get(step, done)]}, ensure_ascii=False)


def _wait_for_agents(prompt: str) -> ToolUse:
    return ToolUse("multi_agent_v1.wait_agent", {"targets": re.findall(r'"agent_id": ?"([^"]+)"', prompt)})


_SUMS_UP = Habits({"side_call": 1, "compaction": 1}, "sums up and goes on from that")
_TITLE = Habits({"side_call": 1}, "asks for a title beside the conversation")
_NOTE = Habits({"transient": 5}, "ends each prompt with a note that is gone in the next one")
_RETOLD = Habits({"rewritten": 5}, "writes the assistant's calls back as text of its own")
_NEW_PROMPTS = Habits({"rewritten": 5}, "makes a new prompt for each step")
_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

ALL: tuple[Harness, ...] = (
    Harness(
        name="pi",
        version="1.6.0",
        dialect="chat",
        install=Npm(package="@earendil-works/pi-coding-agent", program="pi"),
        start=starts.pi,
        shell=_shell("bash"),
        more={"thinking": Habits(), "compaction": _SUMS_UP},
        fast=True,
    ),
    Harness(
        name="mini-swe-agent",
        version="2.4.6",
        dialect="chat",
        install=Pip(package="mini-swe-agent", distribution="mini-swe-agent"),
        start=starts.mini,
        shell=_shell("bash"),
        finish=ToolUse("bash", {"command": _SUBMIT}),
        more={"thinking": Habits()},
        fast=True,
    ),
    Harness(
        name="codex",
        version="0.171.0",
        dialect="responses",
        install=Npm(package="@openai/codex", program="codex"),
        start=starts.codex,
        shell=_shell("exec_command", "cmd"),
        delegate=lambda job: ToolUse("multi_agent_v1.spawn_agent", {"message": job}),
        wait=_wait_for_agents,
        more={
            "thinking": Habits(),
            "delegation": Habits({"sub_agent": 1}, sub_agent_calls=2),
            "compaction": _SUMS_UP,
        },
        fast=True,
    ),
    Harness(
        name="claude-code",
        version="2.1.332",
        dialect="messages",
        install=Npm(package="@anthropic-ai/claude-code", program="claude"),
        start=starts.claude,
        shell=_shell("Bash"),
        delegate=lambda job: ToolUse("Agent", {"description": "Second line", "prompt": job}),
        more={
            "thinking": Habits(),
            "delegation": Habits({"sub_agent": 1}, sub_agent_calls=2),
            "compaction": Habits({"rewritten": 1, "compaction": 1}, "sums up and goes on from that"),
        },
        fast=True,
    ),
    Harness(
        name="opencode",
        version="1.18.33",
        dialect="chat",
        install=Npm(package="opencode-ai", program="opencode"),
        start=starts.opencode,
        shell=lambda command: ToolUse("bash", {"command": command, "description": "Runs a command"}),
        delegate=lambda job: ToolUse("task", {"description": "Second line", "prompt": job, "subagent_type": "general"}),
        habits=_TITLE,
        more={
            "thinking": _TITLE,
            "delegation": Habits({**_TITLE.breaks, "sub_agent": 1}, _TITLE.why, sub_agent_calls=2),
            "compaction": Habits({"side_call": 2, "compaction": 1}, f"{_TITLE.why}; {_SUMS_UP.why}"),
        },
        memory_mb=2048,
        disk_mb=256,
    ),
    Harness(
        name="openclaw",
        version="2026.9.6",
        dialect="chat",
        install=Npm(package="openclaw", program="openclaw"),
        start=starts.openclaw,
        shell=_shell("exec"),
        habits=_NOTE,
        more={
            "thinking": _NOTE,
            "compaction": Habits({**_NOTE.breaks, "side_call": 1}, f"{_NOTE.why}; sums up after its last answer"),
        },
        memory_mb=3072,
        disk_mb=256,
    ),
    Harness(
        name="qwen-code",
        version="0.24.4",
        dialect="chat",
        install=Npm(package="@qwen-code/qwen-code", program="qwen"),
        start=starts.qwen,
        shell=lambda command: ToolUse(
            "run_shell_command", {"command": command, "is_background": False, "description": "Runs a command"}
        ),
        delegate=lambda job: ToolUse(
            "agent", {"description": "Second line", "prompt": job, "run_in_background": False}
        ),
        more={
            "thinking": Habits(),
            "delegation": Habits({"sub_agent": 1}, sub_agent_calls=2),
            "compaction": Habits(
                {"compaction": 1, "rewritten": 1}, f"{_SUMS_UP.why}; puts a note before the summary a call later"
            ),
        },
        fatal=frozenset({"cut_in_answer"}),
        memory_mb=3584,
        disk_mb=256,
    ),
    Harness(
        name="gemini-cli",
        version="0.61.0",
        dialect="gemini",
        install=Npm(package="@google/gemini-cli", program="gemini"),
        start=starts.gemini,
        shell=_shell("run_shell_command"),
        delegate=lambda job: ToolUse("invoke_agent", {"agent_name": "generalist", "prompt": job}),
        helped=ToolUse("complete_task", {"result": {"response": "The second line is there."}}),
        more={
            "thinking": Habits(),
            "delegation": Habits({"sub_agent": 1}, sub_agent_calls=2),
        },
        memory_mb=2048,
    ),
    Harness(
        name="cline",
        version="3.0.65",
        dialect="chat",
        install=Npm(package="cline", program="cline"),
        start=starts.cline,
        shell=lambda command: ToolUse("run_commands", {"commands": [command]}),
        delegate=lambda job: ToolUse("spawn_agent", {"systemPrompt": "You help in a shell.", "task": job}),
        more={"thinking": Habits(), "delegation": Habits({"sub_agent": 1}, sub_agent_calls=2)},
        memory_mb=2048,
        disk_mb=256,
    ),
    Harness(
        name="openai-agents",
        version="0.24.0",
        dialect="chat",
        install=Pip(package="openai-agents", distribution="openai-agents"),
        start=starts.openai_agents,
        shell=_shell("bash"),
        delegate=lambda job: ToolUse("helper", {"input": job}),
        more={
            "thinking": Habits({"reasoning_dropped": 5}, "keeps no reasoning of a conversation in this dialect"),
            "delegation": Habits({"sub_agent": 1}, sub_agent_calls=2),
        },
    ),
    Harness(
        name="smolagents",
        version="1.26.0",
        dialect="chat",
        install=Pip(package="smolagents[openai]", distribution="smolagents"),
        start=starts.smolagents,
        shell=_shell("bash"),
        finish=ToolUse("final_answer", {"answer": "Done."}),
        delegate=lambda job: ToolUse("helper", {"task": job}),
        helped=ToolUse("final_answer", {"answer": "The second line is there."}),
        habits=_RETOLD,
        more={
            "thinking": Habits(_RETOLD.breaks, f"{_RETOLD.why}, without its reasoning"),
            "delegation": Habits({"sub_agent": 1, "rewritten": 7}, _RETOLD.why, sub_agent_calls=2),
        },
    ),
    Harness(
        name="browser-use",
        version="0.13.14",
        dialect="chat",
        install=Pip(package="browser-use", distribution="browser-use", apt={"chromium": "chromium"}),
        start=starts.browser_use,
        shell=_shell("bash"),
        spoken=_browse,
        habits=_NEW_PROMPTS,
        more={"compaction": Habits({**_NEW_PROMPTS.breaks, "side_call": 1}, f"{_NEW_PROMPTS.why}; sums up")},
        memory_mb=3072,
        disk_mb=256,
    ),
)
