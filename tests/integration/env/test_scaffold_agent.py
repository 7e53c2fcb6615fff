"""The agent of a new environment, against a real HTTP server that says what a script tells it."""

import subprocess
import sys
from pathlib import Path

from stub_chat import scripted, stub_chat

from openforge.env.contract import LlmArgs
from openforge.env.new import new_environment
from openforge.env.registry import load_environment


def test_the_agent_runs_what_the_model_says_until_it_says_nothing_more(tmp_path: Path) -> None:
    environment = load_environment(str(new_environment("mine", tmp_path)))
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "a.txt").write_text("x")
    with stub_chat(scripted("First:\n```sh\nmv a.txt b.txt\n```", "```sh\nfalse\n```", "It is done.")) as chat:
        llm = LlmArgs(
            base_url=chat.base_url, api_key="of-key", model="policy", temperature=1.0, top_p=1.0, max_tokens=64
        )
        agent = environment.create_command(harness="agent", instruction="Rename it.", llm_args=llm)
        ((_, program),) = agent.files.items()
        (tmp_path / "agent.py").write_bytes(program)
        argv = [sys.executable, str(tmp_path / "agent.py"), *agent.argv[2:]]
        subprocess.run(argv, cwd=workspace, env={**agent.env, "PATH": "/usr/bin:/bin"}, check=True, timeout=60)
    assert [file.name for file in workspace.iterdir()] == ["b.txt"]
    assert chat.keys == ["Bearer of-key"] * 3
    assert [message["role"] for message in chat.requests[2]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert chat.requests[2]["messages"][5]["content"].startswith("Exit code 1")
