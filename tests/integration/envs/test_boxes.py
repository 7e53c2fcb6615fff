"""The environments in real boxes: tasks are proved as `openforge env check` does, harnesses find what they need."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from sandbox_drivers import full_driver
from stub_chat import StubChat, scripted, stub_chat

from openforge.env.check import check_environment
from openforge.env.contract import CommandAgent, LlmArgs
from openforge.env.registry import load_environment
from openforge.sandbox.contract import Sandbox, SandboxLimits, SandboxSpec
from openforge.sandbox.process import ProcessDriver
from openforge_envs.letters import env as letters
from openforge_envs.shell import env as shell

LIMITS = SandboxLimits(memory_mb=512, pids=64, disk_mb=16)
DELICATE = ["fix_script", "make_directory", "make_executable", "touch"]


@pytest.mark.parametrize(("name", "tasks"), [("letters", ["letters"]), ("shell", DELICATE)])
async def test_reference_passes_and_idleness_fails_in_boxes(name: str, tasks: list[str], tmp_path: Path) -> None:
    driver = full_driver(tmp_path)
    reports = await check_environment(driver, load_environment(name), tasks, seeds=[0])
    await driver.close()
    assert [report.problems for report in reports] == [()] * len(tasks)


@pytest.mark.heavy
async def test_every_shell_task_is_proved(tmp_path: Path) -> None:
    driver = full_driver(tmp_path)
    reports = await check_environment(driver, load_environment("shell"), [], seeds=range(2))
    await driver.close()
    assert {report.task: report.problems for report in reports if report.problems} == {}


@asynccontextmanager
async def box_with_model(folder: Path, chat: StubChat, agent: CommandAgent | None = None) -> AsyncIterator[Sandbox]:
    """A box whose only network leads to the scripted model."""
    port = int(chat.base_url.split(":")[2].split("/")[0])

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_copy(reader, outer), _copy(inner, writer))

    async with AsyncExitStack() as stack:
        server = await asyncio.start_unix_server(forward, path=str(folder / "proxy.sock"))
        stack.callback(server.close)
        driver = full_driver(folder / "state", proxy_socket=folder / "proxy.sock")
        stack.push_async_callback(driver.close)
        box = await _box(driver, agent)
        stack.push_async_callback(box.stop)
        yield box


async def _box(driver: ProcessDriver, agent: CommandAgent | None) -> Sandbox:
    binds = agent.binds if agent else {}
    box = await driver.create(SandboxSpec(name="box", limits=LIMITS, network="proxy-only", binds=binds))
    for path, data in agent.files.items() if agent else ():
        await box.put(path, data)
    return box


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


INSIDE = LlmArgs(
    base_url="http://127.0.0.1:8080/v1", api_key="of-key", model="policy", temperature=1.0, top_p=1.0, max_tokens=16
)


@pytest.mark.parametrize("harness", ["mini", "openai-script"])
async def test_a_program_works_inside_the_box(harness: str, tmp_path: Path) -> None:
    agent = shell.create_command(harness=harness, instruction="Touch a.txt.", llm_args=INSIDE)
    with stub_chat(scripted("```bash\ntouch a.txt\n```", "Done.")) as chat:
        async with box_with_model(tmp_path, chat, agent) as box:
            ended = await box.exec(agent.argv, timeout_s=60, cwd=agent.cwd, env=agent.env)
            assert ended.exit_code == 0, (ended.stdout + ended.stderr)[-2000:]
            assert (await box.exec("ls -A", timeout_s=5)).stdout == b"a.txt\n"


async def test_mini_swe_agent_as_a_pipeline_works_on_a_box(tmp_path: Path) -> None:
    with stub_chat(scripted("```bash\nid -u > who; nosuchcommand\n```")) as chat:
        async with box_with_model(tmp_path, chat) as box:
            env = shell.create_env(box, harness="mini-swe-agent")
            outside = msgspec.structs.replace(INSIDE, base_url=chat.base_url)
            result = await env.run(instruction="Say who you are.", llm_args=outside)
            assert (result.status, result.cause) == ("out_of_turns", "")
            assert (await box.get("/workspace/who")).strip().isdigit()


async def test_the_letters_script_works_inside_the_box(tmp_path: Path) -> None:
    agent = letters.create_command(harness="letters-script", instruction="Write letters only.", llm_args=INSIDE)
    with stub_chat(scripted("abc")) as chat:
        async with box_with_model(tmp_path, chat, agent) as box:
            ended = await box.exec(agent.argv, timeout_s=60, cwd=agent.cwd, env=agent.env)
            assert ended.exit_code == 0, ended.stderr[-2000:]
            assert await box.get("/workspace/answer.txt") == b"abc"
