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
