"""The conversation that checks get to see is the recorded one."""

import json

from attempts import changed, command, conversation, requested, said

from openforge.protos import Caller
from openforge.tokens import rebuild
from openforge.verifier.evidence import transcript_of


def test_it_is_the_agents_own_conversation_from_its_first_message_to_its_last() -> None:
    first, second = conversation(requested("env", "task"), command("ls"), said("done"), results=("a.txt",))
    side_call = changed(first, turn=2, caller=Caller.SIDE_CALL, reply=b'{"role": "assistant", "content": "A title"}')
    messages = json.loads(transcript_of(rebuild([first, changed(second, kept=2), side_call])))
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
    assert [message["content"] for message in messages[2:]] == ["a.txt", "done"]


def test_no_turn_is_no_message() -> None:
    assert transcript_of(rebuild([])) == b"[]"
