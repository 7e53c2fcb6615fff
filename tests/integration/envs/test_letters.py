"""The harnesses of the letters environment against a scripted chat server over real HTTP."""

import asyncio
import os
import subprocess
from pathlib import Path

from folder_sandbox import FolderSandbox
from stub_chat import scripted, stub_chat

from openforge.env.contract import EnvCallResult, LlmArgs
from openforge_envs.letters.env import create_command, create_env


def llm_args(base_url: str, key: str = "of-key") -> LlmArgs:
    return LlmArgs(base_url=base_url, api_key=key, model="policy", temperature=1.0, top_p=1.0, max_tokens=16)


async def episode(folder: Path, args: LlmArgs) -> EnvCallResult:
    env = create_env(FolderSandbox(folder), harness="letters")
    return await env.run(instruction="Write letters only.", llm_args=args)


async def test_the_answer_is_written_to_the_workspace(tmp_path: Path) -> None:
    with stub_chat(scripted("ab�c")) as chat:
        result = await episode(tmp_path, llm_args(chat.base_url))
    assert (result.status, result.reward) == ("finished", None)
    assert (tmp_path / "answer.txt").read_text() == "ab�c"
    assert chat.requests[0]["messages"] == [{"role": "user", "content": "Write letters only."}]
    assert chat.requests[0]["max_tokens"] == 16


async def test_episodes_share_connections_but_no_keys(tmp_path: Path) -> None:
    with stub_chat(scripted("abc")) as chat:
        await asyncio.gather(*(episode(tmp_path / str(n), llm_args(chat.base_url, key=f"key-{n}")) for n in range(16)))
    assert sorted(chat.keys) == sorted(f"Bearer key-{n}" for n in range(16))


async def test_a_full_window_is_the_policys_doing_and_a_refusal_is_not(tmp_path: Path) -> None:
    full = (400, {"error": {"message": "too long", "code": "context_length_exceeded"}})
    with stub_chat(scripted(full)) as chat:
        assert (await episode(tmp_path, llm_args(chat.base_url))).status == "out_of_context"
    with stub_chat(scripted((403, {"error": {"message": "unknown key"}}))) as chat:
        result = await episode(tmp_path, llm_args(chat.base_url))
    assert result.status == "censored"
    assert "unknown key" in result.cause


def test_the_script_does_the_same_as_a_program(tmp_path: Path) -> None:
    with stub_chat(scripted("abc")) as chat:
        agent = create_command(
            harness="letters-script", instruction="Write letters only.", llm_args=llm_args(chat.base_url)
        )
        ((name, script),) = agent.files.items()
        (tmp_path / Path(name).name).write_bytes(script)
        argv = [part.replace("/tmp/harness", str(tmp_path)) for part in agent.argv]
        subprocess.run(argv, cwd=tmp_path, env={**os.environ, **agent.env}, check=True)
    assert (tmp_path / "answer.txt").read_text() == "abc"
    assert chat.keys == ["Bearer of-key"]
