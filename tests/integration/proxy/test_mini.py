"""mini-swe-agent itself, as published, against the proxy: several turns are one sequence."""

from pathlib import Path

import pytest
from folder_sandbox import FolderSandbox
from proxy_fixtures import ProxyAtWork
from stub_engine import StubEngine

from openforge.env.contract import LlmArgs
from openforge.protos import BranchCause, TurnStatus
from openforge.tokens import merge, rebuild
from openforge_envs.shell.env import create_env

# The packages that mini-swe-agent brings warn about one another while they are imported.
pytestmark = pytest.mark.filterwarnings("default")


def block(command: str) -> str:
    return f"Sure:\n```bash\n{command}\n```"


async def test_several_turns_of_mini_are_one_sequence(
    proxy: ProxyAtWork, stub_engine: StubEngine, tmp_path: Path
) -> None:
    stub_engine.says(
        block("echo é > a.txt; ls"), block("nosuchcommand"), block("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    )
    work = tmp_path / "work"
    work.mkdir()
    env = create_env(FolderSandbox(work), harness="mini-swe-agent", config="multi_turn")
    arguments = LlmArgs(
        base_url=proxy.base_url(),
        api_key=await proxy.key(),
        model="policy",
        temperature=0.7,
        top_p=1.0,
        max_tokens=128,
        stop=("```\n\n",),
    )
    result = await env.run(instruction="Make a file.", llm_args=arguments)
    assert result.status == "finished"
    turns = await proxy.turns()
    assert [turn.cause for turn in turns] == [BranchCause.START, BranchCause.CONTINUED, BranchCause.CONTINUED]
    assert {turn.status for turn in turns} == {TurnStatus.DELIVERED}
    merged = merge(rebuild(turns))
    assert (len(merged.sequences), merged.delivered_fraction, merged.extra_prefill_ratio) == (1, 1.0, 1.0)
    assert stub_engine.requests[0].sampling_params.stop == ["```\n\n"]
