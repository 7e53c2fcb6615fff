"""Whatever a harness does to its history: no sampled token is lost or trained twice, no sequence is one too many."""

import random
from itertools import count, pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wanderer import BASH, Talk, Wanderer, user

from openforge.protos import BranchCause, Caller
from openforge.tokens import Conversation, Merged, merge, rebuild


def wandered(rng: random.Random) -> Wanderer:
    wanderer = Wanderer(rng)
    wanderer.wander(rng.randrange(1, 7))
    return wanderer


def check(wanderer: Wanderer) -> None:
    talk = wanderer.talk
    assert wanderer.lost == []
    conversation = rebuild(talk.facts)
    for turn, rebuilt in zip(talk.tree.turns, conversation, strict=True):
        assert rebuilt.ids == talk.tree.ids(turn)
        if turn.cause is BranchCause.CONTINUED:
            assert turn.parent is not None
            assert rebuilt.prompt.startswith(conversation.turns[turn.parent].ids)
    for context in ((), (Caller.SIDE_CALL,), (Caller.SIDE_CALL, Caller.SUB_AGENT)):
        merged = merge(conversation, context=context)
        check_tokens(conversation, merged)
        trained = [number for sequence in merged.sequences for number in sequence.turns]
        assert len(merged.sequences) == fewest(conversation, trained)
        check_unread(conversation, set(trained), wanderer.unread)


def check_unread(conversation: Conversation, trained: set[int], unread: set[int]) -> None:
    """An answer that nobody read is trained only in the place of the same answer to the same call, which is not."""
    for number in unread & trained:
        same = conversation.turns[number].ids
        assert any(turn.ids == same and turn.fact.turn not in trained | unread for turn in conversation)


def check_tokens(conversation: Conversation, merged: Merged) -> None:
    trained = [number for sequence in merged.sequences for number in sequence.turns]
    assert len(trained) == len(set(trained))
    for sequence in merged.sequences:
        spans = []
        for number in sequence.turns:
            turn = conversation.turns[number]
            assert sequence.ids.startswith(turn.ids)
            spans.append((turn.prompt_length, turn.sampled_length))
        assert [(span.start, span.length) for span in sequence.loss] == spans
        assert all(start + length <= after for (start, length), (after, _) in pairwise(spans))
    delivered = sum(conversation.turns[number].sampled_length for number in trained)
    assert delivered + sum(entry.tokens for entry in merged.dropped) == merged.sampled_tokens
    assert merged.sampled_tokens == sum(turn.sampled_length for turn in conversation)


def fewest(conversation: Conversation, turns: list[int]) -> int:
    """The least number of chains that cover the turns: all of them less the largest matching of turns to one that can
    come right after (Dilworth's theorem as Fulkerson proved it; "comes before" is transitive here)."""
    follows = {
        number: [
            other for other in turns if conversation.turns[other].prompt.startswith(conversation.turns[number].ids)
        ]
        for number in turns
    }
    after: dict[int, int] = {}

    def matched(number: int, seen: set[int]) -> bool:
        for other in follows[number]:
            if other not in seen:
                seen.add(other)
                if other not in after or matched(after[other], seen):
                    after[other] = number
                    return True
        return False

    return len(turns) - sum(matched(number, set()) for number in turns)


def check_restart(wanderer: Wanderer) -> None:
    """A restarted proxy has the same tree, and does with any next call what the old one would have done."""
    talk, restored = wanderer.talk, wanderer.talk.restored()
    for turn, twin in zip(talk.tree.turns, restored.tree.turns, strict=True):
        assert talk.tree.ids(turn) == restored.tree.ids(twin)
        assert (turn.steps, turn.kept, turn.tools, turn.reply, turn.caller, turn.followed) == (
            (twin.steps, twin.kept, twin.tools, twin.reply, twin.caller, twin.followed)
        )
    for line in wanderer.lines:
        for tools in (line.tools, (BASH,)):
            one, other = (
                each.place(*line.messages, user("next"), tools=tools, harness=line.harness) for each in (talk, restored)
            )
            assert (one.cause, one.caller, one.parent, one.prefix, one.kept, one.prompt) == (
                (other.cause, other.caller, other.parent, other.prefix, other.kept, other.prompt)
            )


@given(st.randoms(use_true_random=False))
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_token_is_lost_or_doubled_whatever_a_harness_does(rng: random.Random) -> None:
    wanderer = wandered(rng)
    check(wanderer)
    check_restart(wanderer)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_conversation_trees(seed: int) -> None:
    """Ten thousand different ones, over all seeds."""
    causes: set[BranchCause] = set()
    trees: set[tuple[bytes, ...]] = set()
    for number in count():
        wanderer = wandered(random.Random(f"{seed}/{number}"))
        check(wanderer)
        check_restart(wanderer)
        causes |= {fact.cause for fact in wanderer.talk.facts}
        trees.add(tuple(fact.encode() for fact in wanderer.talk.facts))
        if len(trees) == 2500:
            break
    assert causes == set(BranchCause) - {BranchCause.TEMPLATE}


def test_what_a_wandering_harness_leaves_in_the_record_restores_at_every_point() -> None:
    wanderer = wandered(random.Random(5))
    for told in range(len(wanderer.talk.facts) + 1):
        part = Talk()
        part.facts = wanderer.talk.facts[:told]
        part.tree.restore(part.facts)
        assert [turn.cause for turn in part.tree.turns] == [fact.cause for fact in part.facts]
