"""ClawEval's task folders, written for OpenForge, proved in real boxes with real services and a real judge endpoint."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from claw_agents import BOOKED, HONEST, LOOKED, ROOM, SAID, calls, played
from needed import needs
from stub_chat import Reply, StubChat, scripted, stub_chat

import openforge_envs.claw_eval.env as claw_eval
from openforge.endpoint import Address, Endpoint
from openforge.env.check import check_task
from openforge.env.claw_eval import ClawEvalTask, load_claw_eval_tasks
from openforge.env.contract import TaskInstance
from openforge.env.judge import EndpointJudge, JudgeFailed
from openforge.env.task_file import BadTask
from openforge.env.verdict import Broke, Scored
from openforge.env.verify import CannotVerify, Checker, Work
from openforge.sandbox.process import ProcessDriver

pytestmark = needs("/usr/bin/python3")
KIND = '{"score": 1.0, "reasoning": "kind and correct"}'


@pytest.fixture
async def checker(tmp_path: Path) -> AsyncIterator[Checker]:
    driver = ProcessDriver(tmp_path / "boxes", proxy_socket=None, owner="test", allow_reduced=True)
    yield Checker(driver, tmp_path)
    await driver.close()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of our own, to change."""
    folder = tmp_path / "checkout"
    for part in ("tasks", "mock_services"):
        shutil.copytree(claw_eval.HERE / part, folder / part)
    return folder


@pytest.fixture
def room(checkout: Path) -> TaskInstance:
    return ClawEvalTask(checkout, checkout / "tasks" / "O01_book_a_room").draw(0, "heldout")


@pytest.fixture
def parcel(checkout: Path) -> TaskInstance:
    return ClawEvalTask(checkout, checkout / "tasks" / "O02_late_parcel").draw(0, "heldout")


@asynccontextmanager
async def judged(*replies: Reply) -> AsyncIterator[tuple[StubChat, EndpointJudge]]:
    with stub_chat(scripted(*replies)) as chat:
        address = Address(section="judge", url=chat.base_url, model="judge-1", key_env="JUDGE_KEY_OF_TEST")
        async with Endpoint(address, pauses_s=()) as endpoint:
            yield chat, EndpointJudge(endpoint, max_tokens=64)


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY_OF_TEST", "secret-of-the-judge")


async def scored(checker: Checker, instance: TaskInstance, *replies: Reply) -> Scored:
    work, _, _ = await played(checker.driver, instance, replies)
    outcome = await checker.score(instance, work, name="v")
    assert isinstance(outcome, Scored), outcome
    return outcome


async def test_env_check_proves_tasks_with_services_graders_and_a_judge(checker: Checker, checkout: Path) -> None:
    async with judged(KIND) as (_, judge):
        for task in load_claw_eval_tasks(checkout):
            assert (await check_task(checker.driver, task, [0], judge)).problems == ()


async def test_an_honest_agent_scores_and_an_idle_one_earns_nothing(checker: Checker, room: TaskInstance) -> None:
    honest = await scored(checker, room, *HONEST)
    assert (honest.reward, honest.metrics["score"], honest.metrics["robustness"]) == (1.0, 1.0, 1.0)
    idle = await scored(checker, room, "There is nothing to do.")
    assert (idle.reward, idle.metrics["score"], idle.metrics["robustness"]) == (0.0, 0.0, 0.0)
    assert (await scored(checker, room, "I booked Linden.")).reward == 0.0


async def test_what_is_forbidden_costs_all_of_it(checker: Checker, room: TaskInstance) -> None:
    cancelled = calls(("rooms_cancel", {"title": "Interviews"}))
    outcome = await scored(checker, room, LOOKED, BOOKED, cancelled, SAID)
    assert (outcome.reward, outcome.metrics["score"], outcome.metrics["safety"]) == (0.0, 0.0, 0.0)


async def test_wrong_calls_are_answered_and_recovering_from_them_counts(checker: Checker, room: TaskInstance) -> None:
    wrong = calls(("rooms_book", {**ROOM, "room": "Birch"}), ("rooms_fly", {}), ("rooms_book", "not json"))
    work, ended, said = await played(checker.driver, room, (LOOKED, wrong, BOOKED, SAID))
    answers = [message["content"] for message in said if message["role"] == "tool"]
    assert json.loads(answers[0])["rooms"][0]["name"] == "Ash"
    assert answers[1] == 'Error 422: {"error": "Wrong: Birch is not free then"}'
    assert answers[2].startswith('Error 404: {"error": "there is no tool \'rooms_fly\'')
    assert answers[3].startswith('Error 400: {"error": "the arguments are no JSON object')
    assert (ended.metrics["tool_calls"], ended.metrics["tool_coverage"]) == (5.0, 2 / 3)
    outcome = await checker.score(room, work, name="v")
    assert isinstance(outcome, Scored)
    assert outcome.metrics["robustness"] == 0.5  # rooms_book failed and then worked, rooms_fly never did
    assert outcome.reward == 1.0


async def test_services_begin_afresh_and_their_health_check_is_nobodys_call(
    checker: Checker, checkout: Path, room: TaskInstance
) -> None:
    grader = checkout / "tasks/O01_book_a_room/grader.py"
    grader.write_text(grader.read_text() + _COUNTS_CALLS)
    counting = ClawEvalTask(checkout, grader.parent).draw(0, "heldout")
    outcome = await scored(checker, counting, *HONEST)
    assert outcome.metrics["communication"] == 2.0


_COUNTS_CALLS = """

_grade = BookARoomGrader.grade


def _counted(self, messages, dispatches, task, audit_data=None, *more):
    scores = _grade(self, messages, dispatches, task, audit_data, *more)
    scores.communication = float(len(self.get_audit_calls(audit_data, "rooms")))
    return scores


BookARoomGrader.grade = _counted
"""


async def test_a_judge_is_asked_outside_and_its_key_is_in_no_box(checker: Checker, checkout: Path) -> None:
    grader = checkout / "tasks/O02_late_parcel/grader.py"
    text = grader.read_text().replace('right[0]["body"]', 'right[0]["body"] + SEEN')
    seen = "import os\nSEEN = repr(dict(os.environ))\n"
    grader.write_text(text.replace("from claw_eval.graders", seen + "from claw_eval.graders", 1))
    task = ClawEvalTask(checkout, grader.parent).draw(0, "heldout")
    async with judged(KIND) as (chat, judge):
        outcome = await checker.score(task, await _reference(checker, task), name="v", judge=judge)
        assert isinstance(outcome, Scored)
        assert (outcome.reward, outcome.metrics["judge_calls"]) == (1.0, 2.0)
        assert len(chat.requests) == 2
        assert set(chat.keys) == {"Bearer secret-of-the-judge"}
        assert {request["model"] for request in chat.requests} == {"judge-1"}
        asked = json.dumps(chat.requests)
        assert "PATH" in asked  # the grader's environment came out
        assert "secret-of-the-judge" not in asked


async def test_the_judge_decides_what_it_is_asked(checker: Checker, parcel: TaskInstance) -> None:
    for answer, reward in (('{"score": 0.0}', 0.0), ("```json\n" + KIND + "\n```", 1.0)):
        async with judged(answer) as (_, judge):
            outcome = await checker.score(parcel, await _reference(checker, parcel), name="v", judge=judge)
        assert isinstance(outcome, Scored)
        assert outcome.reward == reward


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("I like it.", "no score from 0 to 1"),
        ('{"score": 7}', "no score from 0 to 1"),
        ((500, {"error": {"message": "overloaded"}}), "answered 500: overloaded"),
        ((401, {"error": {"message": "no"}}), "judge.key_env"),
        ((200, {"choices": []}), "no message"),
        ((200, {"choices": [{"message": {"content": None}}]}), "no text"),
        ((200, {"choices": [{"message": {"content": [{"type": "text"}]}}]}), "no text"),
    ],
)
async def test_a_judge_that_fails_is_nobodys_verdict(
    checker: Checker, parcel: TaskInstance, reply: Reply, why: str
) -> None:
    async with judged(reply) as (_, judge):
        with pytest.raises(JudgeFailed, match=why):
            await checker.verify(parcel, await _reference(checker, parcel), name="v", judge=judge)


async def test_without_a_judge_it_is_said_who_asks_for_one(checker: Checker, parcel: TaskInstance) -> None:
    with pytest.raises(JudgeFailed, match=r"its grader asks a judge and the run has none: write \[judge\]"):
        await checker.verify(parcel, await _reference(checker, parcel), name="v")


async def test_a_grader_that_breaks_without_a_reference_gives_no_verdict(checker: Checker, checkout: Path) -> None:
    folder = checkout / "tasks/O01_book_a_room"
    (folder / "grader.py").write_text("from claw_eval.graders.base import AbstractGrader\n1 / 0\n")
    (folder / "solution/solve.sh").unlink()
    task = ClawEvalTask(checkout, folder).draw(0, "heldout")
    outcome = await checker.verify(task, Work(), name="v")
    assert isinstance(outcome, CannotVerify)
    assert "this task has no solution/solve.sh" in outcome.detail


async def test_a_grader_may_build_on_that_of_another_task(checker: Checker, checkout: Path) -> None:
    other = checkout / "tasks/O03_the_same"
    shutil.copytree(checkout / "tasks/O01_book_a_room", other)
    (other / "task.yaml").write_text((other / "task.yaml").read_text().replace("O01_book_a_room", "O03_the_same"))
    (other / "grader.py").write_text(
        "from claw_eval.graders.base import load_peer_grader\n"
        'class Same(load_peer_grader("O01_book_a_room")):\n    pass\n'
    )
    assert (await check_task(checker.driver, ClawEvalTask(checkout, other), [0])).problems == ()
    (checkout / "tasks/O01_book_a_room/grader.py").unlink()
    with pytest.raises(BadTask, match="builds on the grader of 'O01_book_a_room', and there is no"):
        ClawEvalTask(checkout, other)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tags: [services]", "user_agent: {enabled: true}", "a simulated user cannot be kept here"),
        ("tags: [services]", "sandbox_files: [fixtures/a.txt]", "sandbox_files = \\['fixtures/a.txt'\\]"),
        ("tags: [services]", "env_snapshot_commands: [ls]", "env_snapshot_commands"),
        ("mock_services/rooms/", "mock_services/web_real/", "services.rooms: it needs the internet"),
    ],
)
def test_what_cannot_be_kept_is_refused_or_left_out(
    checkout: Path, old: str, new: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = checkout / "tasks/O01_book_a_room/task.yaml"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(BadTask, match=said):
        load_claw_eval_tasks(checkout)
    assert [task.id for task in load_claw_eval_tasks(checkout, unsupported="leave out")] == ["O02_late_parcel"]
    assert "1 of 2 ClawEval tasks are left out" in caplog.text


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("port: 9301", "port: soon", "Expected `int`, got `str`"),
        ("task_id: O01_book_a_room", "task_id: O/01", "task_id = 'O/01': use 1 to 128"),
    ],
)
def test_what_is_wrong_is_refused_though_others_may_be_left_out(checkout: Path, old: str, new: str, said: str) -> None:
    file = checkout / "tasks/O01_book_a_room/task.yaml"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(BadTask, match=said):
        load_claw_eval_tasks(checkout, unsupported="leave out")


async def _reference(checker: Checker, task: TaskInstance) -> Work:
    work = await checker.work(task, task.reference, name="ref")
    assert not isinstance(work, Broke), work
    return work
