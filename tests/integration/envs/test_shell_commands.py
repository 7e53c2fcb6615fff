"""The harnesses that are programs, run as the sandbox would run them, against a scripted chat server."""

import os
import subprocess
from pathlib import Path
from typing import Any

from stub_chat import scripted, stub_chat

from openforge.env.contract import CommandAgent, LlmArgs
from openforge_envs.shell.env import create_command


def llm_args(base_url: str) -> LlmArgs:
    return LlmArgs(base_url=base_url, api_key="of-key", model="policy", temperature=0.7, top_p=1.0, max_tokens=48)


def command(harness: str, base_url: str, **options: Any) -> CommandAgent:
    return create_command(harness=harness, instruction="Touch a.txt.", llm_args=llm_args(base_url), **options)


def run(agent: CommandAgent, folder: Path) -> Path:
    """Run it with `/tmp/harness` and `/workspace` below `folder`; the latter's path."""
    workspace, home = folder / "workspace", str(folder / "harness")
    workspace.mkdir()
    for name, data in agent.files.items():
        file = Path(name.replace("/tmp/harness", home))
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(data)
    env = {name: value.replace("/tmp/harness", home) for name, value in agent.env.items()}
    argv = [part.replace("/tmp/harness", home) for part in agent.argv]
    subprocess.run(argv, cwd=workspace, env={**os.environ, "HOME": home, **env}, check=True, stdin=subprocess.DEVNULL)
    return workspace


def test_the_script_works_in_its_directory(tmp_path: Path) -> None:
    with stub_chat(scripted("```bash\ntouch a.txt\n```", "Done.")) as chat:
        workspace = run(command("openai-script", chat.base_url), tmp_path)
    assert [file.name for file in workspace.iterdir()] == ["a.txt"]
    assert set(chat.keys) == {"Bearer of-key"}
    assert "Touch a.txt." in chat.requests[0]["messages"][1]["content"]


def test_the_script_shows_what_came_out_and_ends_at_a_reply_without_a_command(tmp_path: Path) -> None:
    with stub_chat(scripted("```\nls; exit 3\n```", "I am done.")) as chat:
        run(command("openai-script", chat.base_url), tmp_path)
    assert len(chat.requests) == 2
    assert chat.requests[1]["messages"][3] == {"role": "user", "content": "Exit code 3. Output:\n"}


def test_the_script_keeps_to_its_turns(tmp_path: Path) -> None:
    with stub_chat(scripted("```\ntrue\n```")) as chat:
        run(command("openai-script", chat.base_url, turns=3), tmp_path)
    assert len(chat.requests) == 3


def test_the_script_can_take_its_commands_from_tool_calls(tmp_path: Path) -> None:
    function = {"name": "bash", "arguments": '{"command": "touch a.txt"}'}
    calls = [
        {"id": "1", "type": "function", "function": function},
        {"id": "2", "type": "function", "function": {"name": "bash", "arguments": "{broken"}},
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    called = {"id": "x", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
    with stub_chat(scripted((200, called), "Done.")) as chat:
        workspace = run(command("openai-script", chat.base_url, tools=True), tmp_path)
    assert (workspace / "a.txt").exists()
    assert chat.requests[0]["tools"][0]["function"]["name"] == "bash"
    first, second = chat.requests[1]["messages"][3:]
    assert (first["role"], first["tool_call_id"]) == ("tool", "1")
    assert second["content"].startswith("The call is broken")


def test_nothing_of_ours_lies_in_the_workspace_and_no_key_on_the_command_line() -> None:
    for harness in ("mini", "openai-script"):
        agent = command(harness, "http://127.0.0.1:8080/ep/e.0/v1")
        assert not [file for file in agent.files if file.startswith("/workspace")]
        assert "of-key" not in " ".join(agent.argv)
        assert b"of-key" not in b"".join(agent.files.values())
