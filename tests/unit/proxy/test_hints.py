"""What harnesses say of themselves, as it was seen on the wire."""

import json

import msgspec
import pytest

from openforge.chat.fields import beside, fields_of
from openforge.protos import HarnessIdentity
from openforge.proxy.hints import harness_of

CODEX = {
    "user-agent": "codex/1",
    "session-id": "s",
    "thread-id": "t1",
    "x-codex-parent-thread-id": "t0",
    "x-openai-subagent": "collab_spawn",
    "x-codex-window-id": "t1:2",
}


def fields(body: dict[str, object]) -> dict[str, msgspec.Raw]:
    return beside(fields_of(json.dumps(body).encode()))


def test_codex_names_session_thread_parent_window_and_what_a_call_is_for() -> None:
    turn = json.dumps({"request_kind": "compaction", "window_number": 2, "compaction": {"trigger": "auto"}})
    assert harness_of(CODEX | {"x-codex-turn-metadata": turn}) == HarnessIdentity(
        user_agent="codex/1",
        session="s",
        thread="t1",
        parent_thread="t0",
        sub_agent="collab_spawn",
        window="t1:2",
        purpose="compaction",
    )


def test_codex_repeats_it_in_the_body() -> None:
    turn = {"request_kind": "turn", "window_number": 1, "parent_thread_id": "t0", "subagent_kind": "thread_spawn"}
    for metadata in (turn, {"x-codex-turn-metadata": json.dumps(turn)}):
        said = harness_of({}, fields({"prompt_cache_key": "root", "client_metadata": metadata}))
        assert said == HarnessIdentity(
            session="root", parent_thread="t0", sub_agent="thread_spawn", window="1", purpose="turn"
        )


def test_claude_code_names_its_session_in_a_user_id_and_a_sub_agent_in_the_system_prompt() -> None:
    body = {
        "metadata": {"user_id": json.dumps({"session_id": "s", "account": ""})},
        "system": [{"type": "text", "text": "cc_version=2.1.332.abc; cc_is_subagent=true;"}],
        "messages": [{"role": "user", "content": "x" * 10_000}],
    }
    said = harness_of({"x-claude-code-agent-id": "a", "x-claude-code-parent-agent-id": "p"}, fields(body))
    assert said == HarnessIdentity(session="s", thread="a", parent_thread="p", sub_agent="subagent")


def test_a_user_who_writes_the_mark_of_a_sub_agent_is_none() -> None:
    body = {"messages": [{"role": "user", "content": "cc_is_subagent=true"}]}
    assert harness_of({}, fields(body)) == HarnessIdentity()


def test_opencode_has_a_session_for_each_agent() -> None:
    said = harness_of({"x-session-id": "b", "x-session-affinity": "b", "x-parent-session-id": "a"})
    assert (said.session, said.thread, said.parent_thread) == ("b", "b", "a")


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt_cache_key": [1], "metadata": 7, "client_metadata": "{", "user_id": 1}',
        b'{"metadata": {"user_id": "' + b"[" * 5000 + b'"}}',
        b'{"client_metadata": [[1]], "system": 1}',
    ],
)
def test_nonsense_says_nothing(body: bytes) -> None:
    assert harness_of({"x-codex-turn-metadata": "[["}, beside(fields_of(body))) == HarnessIdentity()


def test_a_hint_is_cut() -> None:
    assert len(harness_of({"thread-id": "x" * 5000}).thread) == 200
