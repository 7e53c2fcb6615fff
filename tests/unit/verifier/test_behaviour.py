import json
from typing import Any

import pytest
from attempts import changed, command, conversation, requested, said
from hypothesis import given
from hypothesis import strategies as st

from openforge.tokens import rebuild
from openforge.verifier.behaviour import behaviour_of, only_looks

REQUEST = requested("shell", "rename")


def _behaviour(*replies: dict[str, Any], results: tuple[str, ...] = ()) -> dict[str, float]:
    return behaviour_of(rebuild(conversation(REQUEST, *replies, results=results)))


def _call(arguments: str) -> dict[str, Any]:
    function = {"name": "bash", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def test_commands_are_counted_in_code_blocks_and_in_tool_calls() -> None:
    assert _behaviour(command("ls"), command("mv a b"))["behaviour_tool_calls"] == 2
    assert _behaviour(_call('{"command": "ls"}'), said("done"))["behaviour_tool_calls"] == 1
    flat = {"role": "assistant", "tool_calls": [{"id": "1", "name": "bash", "arguments": '{"command": "ls"}'}]}
    assert _behaviour(flat)["behaviour_tool_calls"] == 1


def test_looking_is_a_self_check_only_after_a_change() -> None:
    counted = _behaviour(command("ls"), command("mv a b"), command("ls -l | head; cat b"), command("test -e b"))
    assert counted["behaviour_self_checks"] == 2


def test_a_command_that_goes_well_after_one_that_failed_is_a_recovery() -> None:
    results = ("Exit code 1. Output:\nmv: No such file or directory", "Exit code 0. Output:\n", "ok")
    counted = _behaviour(command("mv x b"), command("mv a b"), command("ls"), said("done"), results=results)
    assert counted["behaviour_errors"] == 1
    assert counted["behaviour_recoveries"] == 1


def test_a_reply_without_a_command_is_a_format_error_unless_it_is_the_last_word() -> None:
    assert _behaviour(said("I will do it"))["behaviour_format_errors"] == 1
    assert _behaviour(said("Well"), command("ls"), said("done"))["behaviour_format_errors"] == 1
    assert _behaviour(command("ls"), said("done"))["behaviour_format_errors"] == 0


def test_a_tool_call_that_does_not_parse_is_a_format_error() -> None:
    assert _behaviour(_call('{"command": "ls'), command("ls"))["behaviour_format_errors"] == 1
    assert _behaviour(said('<tool_call>{"name": "bash"'), command("ls"))["behaviour_format_errors"] == 1


def test_an_environment_without_commands_has_no_format_errors() -> None:
    (turn,) = conversation(REQUEST, said("b"))
    plain = changed(turn, messages=json.dumps([{"role": "user", "content": "Which letter?"}]).encode())
    assert behaviour_of(rebuild([plain]))["behaviour_format_errors"] == 0


def test_replies_are_measured_in_tokens() -> None:
    assert _behaviour(command("ls"), command("ls"))["behaviour_reply_tokens"] == 5.0


@pytest.mark.parametrize("line", ["ls", "cat a | sort", "cd sub && ls -la", "diff a b; echo $?", "find . -name a"])
def test_a_line_that_only_looks(line: str) -> None:
    assert only_looks(line)


@pytest.mark.parametrize("line", ["", "mv a b", "ls > a", "echo x >> a", "sed -i s/a/b/ c", "ls; rm a"])
def test_a_line_that_does_more(line: str) -> None:
    assert not only_looks(line)


@given(messages=st.binary(max_size=40), reply=st.binary(max_size=40))
def test_whatever_the_messages_hold_is_no_error(messages: bytes, reply: bytes) -> None:
    first, second = conversation(REQUEST, command("ls"), command("ls"))
    turns = [changed(first, reply=reply), changed(second, messages=messages)]
    assert set(behaviour_of(rebuild(turns))) == set(_behaviour(command("ls")))


def _tool(name: str, arguments: Any) -> dict[str, Any]:
    call = {"id": "1", "name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _with_tools(*replies: dict[str, Any], results: tuple[str, ...] = ()) -> dict[str, float]:
    first, *others = conversation(REQUEST, *replies, results=results)
    tools = [{"name": name} for name in ("mail_list", "mail_send", "TodoWrite", "never")]
    return behaviour_of(rebuild([changed(first, tools=json.dumps(tools).encode()), *others]))


def test_the_share_of_the_tools_on_offer_that_were_called_is_their_coverage() -> None:
    counted = _with_tools(_tool("mail_list", {}), _tool("mail_list", {}), _tool("unheard_of", {}), said("done"))
    assert counted["behaviour_tool_coverage"] == 0.25
    assert "behaviour_tool_coverage" not in _behaviour(command("ls"), said("done"))


def test_steps_of_a_plan_are_those_of_its_last_version() -> None:
    def plan(*states: str) -> dict[str, Any]:
        return _tool("TodoWrite", {"todos": [{"content": "a step", "status": state} for state in states]})

    counted = _with_tools(plan("pending", "pending"), plan("completed", "in_progress", "pending"), said("done"))
    assert (counted["behaviour_plan_steps"], counted["behaviour_plan_steps_done"]) == (3, 1)
    boxes = _behaviour(said("- [x] look\n- [ ] move\n* [X] say"), command("ls"))
    assert (boxes["behaviour_plan_steps"], boxes["behaviour_plan_steps_done"]) == (3, 2)
    assert "behaviour_plan_steps" not in _behaviour(command("ls"))


def test_a_tool_that_only_looks_after_one_that_changed_something_is_a_self_check() -> None:
    counted = _with_tools(_tool("mail_list", {}), _tool("mail_send", {"to": "a"}), _tool("mail_list", {}), said("done"))
    assert counted["behaviour_self_checks"] == 1


def test_an_error_that_a_tool_answers_can_be_recovered_from() -> None:
    results = ('Error 422: {"error": "no such address"}', '{"status": "sent"}')
    counted = _with_tools(_tool("mail_send", {"to": "x"}), _tool("mail_send", {"to": "a"}), said("ok"), results=results)
    assert (counted["behaviour_errors"], counted["behaviour_recoveries"]) == (1, 1)
