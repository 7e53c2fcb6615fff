"""mini-swe-agent itself, as published, against a scripted chat server over real HTTP."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from folder_sandbox import FolderSandbox
from stub_chat import scripted, stub_chat

from openforge.env.contract import EnvCallResult, LlmArgs
from openforge_envs.shell.env import create_env

# The packages that mini-swe-agent brings warn about one another while they are imported.
pytestmark = pytest.mark.filterwarnings("default")

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def block(command: str) -> str:
    return f"Sure:\n```bash\n{command}\n```"


def llm_args(base_url: str, key: str = "of-key") -> LlmArgs:
    return LlmArgs(
        base_url=base_url, api_key=key, model="policy", temperature=0.7, top_p=1.0, max_tokens=48, stop=("```\n\n",)
    )


async def episode(folder: Path, base_url: str, **options: Any) -> EnvCallResult:
    env = create_env(FolderSandbox(folder), harness="mini-swe-agent", **options)
    return await env.run(instruction="Create an empty file named a.txt.", llm_args=llm_args(base_url))


async def test_one_reply_is_one_command_in_the_sandbox(tmp_path: Path) -> None:
    with stub_chat(scripted(block("touch a.txt"))) as chat:
        result = await episode(tmp_path, chat.base_url)
    assert result.status == "out_of_turns"
    assert result.reward is None
    assert result.metrics == {"turns": 1.0, "commands": 1.0, "format_errors": 0.0}
    assert (tmp_path / "a.txt").exists()
    (request,) = chat.requests
    assert [message["role"] for message in request["messages"]] == ["system", "user"]
    assert request["messages"][1]["content"] == "Task: Create an empty file named a.txt."
    assert {name: request[name] for name in ("model", "temperature", "max_tokens", "stop")} == {
        "model": "policy",
        "temperature": 0.7,
        "max_tokens": 48,
        "stop": ["```\n\n"],
    }


@pytest.mark.parametrize("reply", ["```\ntouch a.txt\n", "```sh\ntouch a.txt\n```\n\n```bash\nrm a.txt\n```"])
async def test_the_first_block_counts_closed_or_not(reply: str, tmp_path: Path) -> None:
    with stub_chat(scripted(reply)) as chat:
        await episode(tmp_path, chat.base_url)
    assert (tmp_path / "a.txt").exists()


async def test_a_reply_without_a_block_is_giving_up(tmp_path: Path) -> None:
    with stub_chat(scripted("I would use touch.")) as chat:
        result = await episode(tmp_path, chat.base_url)
    assert result.status == "gave_up"
    assert result.metrics["format_errors"] == 1.0


async def test_a_submit_in_the_same_reply_finishes(tmp_path: Path) -> None:
    with stub_chat(scripted(block(f"touch a.txt && {SUBMIT}"))) as chat:
        result = await episode(tmp_path, chat.base_url, config="one_reply_submit")
    assert result.status == "finished"


async def test_several_turns_show_each_output_and_end_with_a_submit_of_their_own(tmp_path: Path) -> None:
    with stub_chat(scripted(block("touch a.txt; ls; nosuchcommand"), block(SUBMIT))) as chat:
        result = await episode(tmp_path, chat.base_url, config="multi_turn")
    assert result.status == "finished"
    assert result.metrics["turns"] == 2.0
    shown = chat.requests[1]["messages"][3]["content"]
    assert shown.startswith("Exit code 127. Output:\na.txt\nbash: line 1: nosuchcommand")


async def test_the_step_limit_of_the_options_holds(tmp_path: Path) -> None:
    with stub_chat(scripted(block("true"))) as chat:
        result = await episode(tmp_path, chat.base_url, config="multi_turn", step_limit=3)
    assert (result.status, result.metrics["turns"]) == ("out_of_turns", 3.0)


async def test_a_full_window_is_the_policys_doing(tmp_path: Path) -> None:
    refusal = {"error": {"message": "This model's maximum context length is 512 tokens", "code": "x"}}
    with stub_chat(scripted((400, refusal))) as chat:
        result = await episode(tmp_path, chat.base_url)
    assert result.status == "out_of_context"


async def test_a_refused_call_is_censored_at_once(tmp_path: Path) -> None:
    with stub_chat(scripted((409, {"error": {"message": "the attempt has ended"}}))) as chat:
        result = await episode(tmp_path, chat.base_url)
    assert result.status == "censored"
    assert "the attempt has ended" in result.cause
    assert len(chat.requests) <= 3, "only the client's own quick retries"


async def test_a_lost_sandbox_is_censored(tmp_path: Path) -> None:
    sandbox = FolderSandbox(tmp_path)
    sandbox.lost = True
    with stub_chat(scripted(block("true"))) as chat:
        env = create_env(sandbox, harness="mini-swe-agent")
        result = await env.run(instruction="Do it.", llm_args=llm_args(chat.base_url))
    assert result.status == "censored"
    assert result.cause == "sandbox: the test took it away"


async def test_episodes_of_one_process_keep_their_keys_apart(tmp_path: Path) -> None:
    def answer(request: dict[str, Any]) -> str:
        return block(f"touch {request['messages'][1]['content'].split()[-1]}")

    async def one(number: int, base_url: str) -> EnvCallResult:
        folder = tmp_path / str(number)
        folder.mkdir()
        env = create_env(FolderSandbox(folder), harness="mini-swe-agent")
        return await env.run(instruction=f"Touch {number}", llm_args=llm_args(base_url, key=f"key-{number}"))

    with stub_chat(answer) as chat:
        results = await asyncio.gather(*(one(number, chat.base_url) for number in range(16)))
    assert {result.status for result in results} == {"out_of_turns"}
    assert all((tmp_path / str(number) / str(number)).exists() for number in range(16))
    asked = {key: request["messages"][1]["content"] for key, request in zip(chat.keys, chat.requests, strict=True)}
    assert asked == {f"Bearer key-{number}": f"Task: Touch {number}" for number in range(16)}


async def test_an_episode_that_is_called_off_starts_no_further_command(tmp_path: Path) -> None:
    def answer(request: dict[str, Any]) -> str:
        time.sleep(0.5)
        return block("touch late")

    with stub_chat(answer) as chat:
        work = asyncio.create_task(episode(tmp_path, chat.base_url))
        while not chat.requests:
            await asyncio.sleep(0.02)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        await asyncio.sleep(0.8)
    assert not (tmp_path / "late").exists()


def test_an_unknown_configuration_names_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use one of one_reply, one_reply_submit, multi_turn"):
        create_env(FolderSandbox(tmp_path), harness="mini-swe-agent", config="nosuch")
