"""Agents at ClawEval tasks, played by a script over real HTTP, in real boxes."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from stub_chat import Reply, scripted, stub_chat

from openforge.env.claw_eval import ClawEvalTools
from openforge.env.contract import SERVICES_FOLDER, EnvCallResult, LlmArgs, TaskInstance
from openforge.env.pack import pack
from openforge.env.react import ReactLoop
from openforge.env.verify import Work, collect
from openforge.sandbox.contract import SandboxDriver, SandboxSpec
from openforge.sandbox.services import Services

ROOM = {"room": "Linden", "date": "2031-05-12", "time": "10:00", "title": "Budget review"}


def calls(*asked: tuple[str, Any]) -> Reply:
    """A reply that calls tools; arguments that are text are sent as they are."""
    made = [
        {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": tool, "arguments": said if isinstance(said, str) else json.dumps(said)},
        }
        for number, (tool, said) in enumerate(asked)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": made}
    return 200, {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}


LOOKED = calls(("rooms_free", {"date": "2031-05-12", "time": "10:00"}))
BOOKED = calls(("rooms_book", ROOM))
SAID = "I booked Linden."
HONEST: tuple[Reply, ...] = (LOOKED, BOOKED, SAID)


async def played(
    driver: SandboxDriver, instance: TaskInstance, replies: Sequence[Reply]
) -> tuple[Work, EnvCallResult, list[dict[str, Any]]]:
    """What is left when a policy with these replies has worked at the task, and the last request that it got."""
    box = await driver.create(SandboxSpec(name="agent", limits=instance.limits, network="none"))
    services = Services(box, longest_s=120.0)
    try:
        await box.put_tar(SERVICES_FOLDER, pack(instance.service_files))
        await services.start(instance.services)
        with stub_chat(scripted(*replies)) as chat:
            llm = LlmArgs(base_url=chat.base_url, api_key="k", model="policy", temperature=1, top_p=1, max_tokens=64)
            ended = await ReactLoop(ClawEvalTools(box)).run(instruction=instance.instruction, llm_args=llm)
        await collect(box, instance)
        last = replies[-1]
        said: list[dict[str, Any]] = [*chat.requests[-1]["messages"], {"role": "assistant", "content": last}]
        files = await box.get_tar(instance.artifacts)
        return Work(files=files, transcript=msgspec.json.encode([_recorded(message) for message in said])), ended, said
    finally:
        await box.stop()
        await services.stop()


def _recorded(message: dict[str, Any]) -> dict[str, Any]:
    """A message of Chat Completions as the proxy records it."""
    made = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls") or ()]
    return {**message, "content": message.get("content") or "", "tool_calls": made}
