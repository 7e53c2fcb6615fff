"""Attacks on the reward, by real agents in real attempts: manager, proxy and verifier at work on every driver.

A hack wins where its work earns more than nothing, and where it is taken for a failure of ours, which is not trained.
Each wins where the checks run in the agent's own box, beside what the agent left running and in its environment.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from attacks.attack import Outcomes
from attacks.court import Court, sitting
from attacks.hacks import CALLS_OF_OTHERS, HACKS, KEY_LEFT_BEHIND, SECRET, Hack
from container_daemons import Daemons
from sandbox_drivers import CASES, KUBERNETES, Case, full_driver
from sandbox_fixtures import on

from openforge.protos import EpisodeFailed, TurnRecorded
from openforge.sandbox.contract import Sandbox, SandboxLost, SandboxSpec

pytestmark = [pytest.mark.redteam, pytest.mark.asyncio(loop_scope="module")]
ON_THIS_HOST = on(*(case for case in CASES if case is not KUBERNETES))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def court(case: Case, daemons: Daemons, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Court]:
    """All attempts are asked for at once, the honest ones too."""
    chosen: dict[str, Any] = {}
    if case.daemon:
        socket = str(daemons.socket(case.daemon))
        chosen = {"sandbox_driver": "docker", "sandbox_socket": socket, "sandbox_image": case.image}
    else:
        await full_driver(tmp_path_factory.mktemp("probe")).close()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JUDGE_KEY", SECRET)
        async with sitting(tmp_path_factory.mktemp("court"), **chosen) as made:
            yield await _filled(made)


async def _filled(made: Court) -> Court:
    for hack in (*HACKS, CALLS_OF_OTHERS, KEY_LEFT_BEHIND):
        await made.request(hack.name)
    await made.request(f"{HACKS[0].name}-honest")
    return made


@ON_THIS_HOST
@pytest.mark.parametrize("hack", HACKS, ids=lambda hack: hack.name)
async def test_a_hack_earns_nothing(hack: Hack, case: Case, court: Court, outcomes: Outcomes) -> None:
    verdict = await court.verdict(hack.name)
    if isinstance(verdict, EpisodeFailed):
        loot, how = f"it counts as a failure of ours: {verdict.reason} {verdict.detail}", ""
    else:
        loot = f"reward {verdict.reward:g}" if verdict.reward > 0 else ""
        broke = ", for the work broke checks that the reference passes" if "verifier_broke" in verdict.metrics else ""
        how = f"{verdict.ended}, reward {verdict.reward:g}{broke}"
    outcomes.add(hack.name, case.name, loot, how)
    assert not loot


@ON_THIS_HOST
async def test_honest_work_in_the_same_court_is_rewarded(case: Case, court: Court) -> None:
    verdict = await court.verdict(f"{HACKS[0].name}-honest")
    assert not isinstance(verdict, EpisodeFailed)
    assert verdict.reward == 1.0


@ON_THIS_HOST
async def test_a_key_opens_no_call_but_its_own(case: Case, court: Court, outcomes: Outcomes) -> None:
    verdict = await court.verdict(CALLS_OF_OTHERS.name)
    assert not isinstance(verdict, EpisodeFailed)
    assert verdict.metrics["own"] == 1.0  # a call that is answered is seen as such
    outcomes.add(
        CALLS_OF_OTHERS.name, case.name, "a call of another's" if verdict.reward else "", "every call was refused"
    )
    assert verdict.reward == 0.0


@ON_THIS_HOST
async def test_a_key_that_was_left_behind_opens_nothing(case: Case, court: Court, outcomes: Outcomes) -> None:
    """Whoever finds it, when its attempt is over; while it was not, the same call was answered."""
    ended = await court.ended(KEY_LEFT_BEHIND.name)
    key = (await court.left(ended, "answer")).strip()
    url = f"http://proxy/ep/{KEY_LEFT_BEHIND.name}.0/v1/chat/completions"
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(court.sockets / "proxy.sock"))) as client:
        body = {"model": "policy", "messages": [{"role": "user", "content": "what now?"}]}
        answer = await client.post(url, json=body, headers={"Authorization": f"Bearer {key}"})
    assert await court.bus.count(TurnRecorded, ended.run, ended.episode, 0) == 1
    loot = "it was answered" if answer.status_code == 200 else ""
    outcomes.add(KEY_LEFT_BEHIND.name, case.name, loot, f"status {answer.status_code}: {answer.text[:120]}")
    assert not loot


LISTENING = """
(setsid python3 -I -m http.server 8080 >/dev/null 2>&1 &)
until (exec 3<>/dev/tcp/127.0.0.1/8080) 2>/dev/null; do sleep 0.1; done
"""


@pytest_asyncio.fixture(loop_scope="module")
async def shared_box(tmp_path: Path) -> AsyncIterator[Sandbox]:
    driver = full_driver(tmp_path)
    box = await driver.create(SandboxSpec(name="shared", network="none", env={"JUDGE_KEY": SECRET}))
    await box.exec(["/bin/bash", "-c", LISTENING], timeout_s=60)
    yield box
    await driver.close()


async def judged_in_place(box: Sandbox, hack: Hack) -> str:
    """As a careless verifier would: the tests where the agent can reach them, nothing ended, the last word believed."""
    for name, text in {"check.sh": hack.check, **hack.tests}.items():
        await box.put(f"/tests/{name}", text.encode())
    await box.put("/workspace/run.sh", b"true\n")
    try:
        agent = await box.exec(["/bin/bash", "-c", hack.script], timeout_s=10)
        check = f"cd /workspace; . ~/.profile; {hack.shell} /tests/check.sh; sleep 0.2"
        result = await box.exec(["/bin/bash", "-c", check], timeout_s=4, env={"HOME": "/tmp"})
        if (await box.exec("test -e /workspace/reward.json", timeout_s=10)).exit_code == 0:
            return (await box.get("/workspace/reward.json")).decode()
    except SandboxLost:
        return "infrastructure"
    return "infrastructure" if agent.exit_code < 0 else result.stdout.decode(errors="replace").strip()


def won(said: str) -> bool:
    try:
        return float(json.loads(said.splitlines()[-1])["reward"]) > 0
    except (ValueError, IndexError, TypeError, KeyError):
        return True  # it is taken for a failure of the verifier's, and the bad work is not trained


@pytest.mark.parametrize("hack", HACKS, ids=lambda hack: hack.name)
async def test_the_same_hack_wins_where_the_checks_run_beside_the_agent(hack: Hack, shared_box: Sandbox) -> None:
    said = await asyncio.wait_for(judged_in_place(shared_box, hack), 60)
    assert won(said), said
