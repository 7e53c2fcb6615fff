"""Our own loop and the environments that `openforge env new` writes, against a real HTTP server and real commands."""

from pathlib import Path
from typing import Any

import pytest
from folder_sandbox import FolderSandbox
from stub_chat import scripted, stub_chat

from openforge.env.contract import HarnessKind, LlmArgs
from openforge.env.new import CannotCreate, new_environment
from openforge.env.react import ReactLoop
from openforge.env.registry import load_environment


def llm(base_url: str) -> LlmArgs:
    return LlmArgs(base_url=base_url, api_key="of-key", model="policy", temperature=1.0, top_p=1.0, max_tokens=64)


def called(*commands: str) -> tuple[int, dict[str, Any]]:
    """A reply that calls the tool `sh` once for each command."""
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "sh", "arguments": f'{{"command": "{command}"}}'}}
        for i, command in enumerate(commands)
    ]
    return 200, {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": calls}}]}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / "a.txt").write_text("x")
    return folder


def loop_of(tmp_path: Path, workspace: Path, **options: Any) -> ReactLoop:
    module = load_environment(str(new_environment("mine", tmp_path, "direct")))
    return ReactLoop(module.create_direct(FolderSandbox(workspace), harness="react"), **options)


async def test_a_new_direct_environment_runs_each_call_until_a_reply_has_none(tmp_path: Path, workspace: Path) -> None:
    loop = loop_of(tmp_path, workspace)
    with stub_chat(scripted(called("mv a.txt b.txt", "false"), "It is done.")) as chat:
        result = await loop.run(instruction="Rename it.", llm_args=llm(chat.base_url))
    assert result.status == "finished"
    assert result.metrics == {"commands": 2.0, "turns": 2.0}
    assert [file.name for file in workspace.iterdir()] == ["b.txt"]
    assert set(chat.keys) == {"Bearer of-key"}
    shown = chat.requests[1]["messages"]
    assert [message["role"] for message in shown] == ["system", "user", "assistant", "tool", "tool"]
    assert [message["tool_call_id"] for message in shown[3:]] == ["c0", "c1"]
    assert shown[4]["content"].startswith("Exit code 1")
    assert chat.requests[0]["tools"][0]["function"]["name"] == "sh"


@pytest.mark.parametrize(
    ("code", "status"),
    [("turn_limit_reached", "out_of_turns"), ("context_length_exceeded", "out_of_context"), ("other", "censored")],
)
async def test_each_refusal_is_an_end_of_its_own(tmp_path: Path, workspace: Path, code: str, status: str) -> None:
    loop = loop_of(tmp_path, workspace)
    with stub_chat(scripted(called("true"), (400, {"error": {"code": code, "message": "no"}}))) as chat:
        result = await loop.run(instruction="Rename it.", llm_args=llm(chat.base_url))
    assert (result.status, result.metrics) == (status, {"commands": 1.0, "turns": 1.0})
    assert len(chat.requests) == 2


async def test_a_model_that_is_away_for_a_moment_is_asked_again(tmp_path: Path, workspace: Path) -> None:
    loop = loop_of(tmp_path, workspace)
    with stub_chat(scripted((503, {"error": {"code": "engine_failed"}}), "Done.")) as chat:
        result = await loop.run(instruction="Rename it.", llm_args=llm(chat.base_url))
    assert (result.status, len(chat.requests)) == ("finished", 2)


async def test_the_loop_ends_at_its_own_bound(tmp_path: Path, workspace: Path) -> None:
    loop = loop_of(tmp_path, workspace, turns=3)
    with stub_chat(scripted(called("true"))) as chat:
        result = await loop.run(instruction="Rename it.", llm_args=llm(chat.base_url))
    assert (result.status, len(chat.requests)) == ("out_of_turns", 3)


async def test_a_new_pipeline_acts_through_its_sandbox(tmp_path: Path, workspace: Path) -> None:
    module = load_environment(str(new_environment("mine", tmp_path, "pipeline")))
    env = module.create_env(FolderSandbox(workspace), harness="agent")
    with stub_chat(scripted("```sh\nmv a.txt b.txt\n```", "Done.")) as chat:
        result = await env.run(instruction="Rename it.", llm_args=llm(chat.base_url))
    assert (result.status, result.metrics) == ("finished", {"commands": 1.0})
    assert [file.name for file in workspace.iterdir()] == ["b.txt"]


@pytest.mark.parametrize("kind", ["command", "pipeline", "direct"])
def test_a_new_environment_hosts_the_kind_that_was_asked_for(tmp_path: Path, kind: HarnessKind) -> None:
    folder = new_environment("mine", tmp_path, kind)
    module = load_environment(str(folder))
    assert list(module.HARNESSES.values()) == [kind]
    assert f'harness = "{next(iter(module.HARNESSES))}"' in (folder / "README.md").read_text()
    assert sorted(template.id for template in module.tasks()) == ["count", "rename"]


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotCreate, match="use one of command, direct, pipeline"):
        new_environment("mine", tmp_path, "remote")  # type: ignore[arg-type]
