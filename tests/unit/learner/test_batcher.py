"""The batch former, decision by decision."""

import msgspec
import pytest
from batcher_facts import at, closed, header, name, opened, ready, retired, rules, trained

from openforge.learner.batcher import Batcher, Done, Retire, Train, Wait
from openforge.protos import RetireReason


def test_a_batch_takes_the_oldest_groups_first() -> None:
    batcher = at(1, rules())
    ready(batcher, 0, {1: 4})
    ready(batcher, 1, {0: 2, 1: 2})
    ready(batcher, 2, {1: 4})
    action = batcher.decide(0.0)
    assert isinstance(action, Train)
    assert action.groups == (name(1), name(0))
    assert action.lag == 1
    assert {count.lag: count.tokens for count in action.lags} == {0: 12, 1: 4}


def test_an_open_group_is_not_trained() -> None:
    batcher = Batcher(rules(groups_per_step=1))
    batcher.apply(opened(0))
    batcher.apply(header(0, 0))
    batcher.apply(header(0, 1))
    assert isinstance(batcher.decide(0.0), Wait)
    batcher.apply(closed(0))
    assert isinstance(batcher.decide(0.0), Train)


def test_a_closed_group_waits_for_the_verdicts_that_it_names() -> None:
    batcher = Batcher(rules(groups_per_step=1))
    batcher.apply(opened(0))
    batcher.apply(header(0, 0))
    batcher.apply(closed(0))
    assert isinstance(batcher.decide(0.0), Wait)
    batcher.apply(header(0, 1))
    assert isinstance(batcher.decide(0.0), Train)


def test_the_bound_is_inclusive() -> None:
    batcher = at(3, rules(groups_per_step=1, max_lag=2))
    ready(batcher, 0, {1: 1, 3: 9})
    action = batcher.decide(0.0)
    assert isinstance(action, Train)
    assert action.lag == 2


def test_drop_retires_the_whole_group_for_one_token_beyond_the_bound() -> None:
    batcher = at(3, rules(groups_per_step=1, max_lag=1))
    batcher.apply(opened(0))
    batcher.apply(header(0, 0, {1: 1, 3: 9}))
    batcher.apply(header(0, 1, {3: 9}))
    batcher.apply(closed(0))
    action = batcher.decide(0.0)
    assert isinstance(action, Retire)
    assert (action.reason, action.lag, len(action.headers)) == (RetireReason.STALE, 2, 2)


def test_a_group_that_lost_what_it_needs_is_retired_whole_also_by_who_reads_only_half_of_that() -> None:
    batcher = Batcher(rules(groups_per_step=1))
    ready(batcher, 0, {0: 4})
    assert isinstance(batcher.decide(0.0), Train)
    action = batcher.lost(name(0), "its file is gone")
    assert (action.reason, action.detail, len(action.headers)) == (RetireReason.LOST, "its file is gone", 2)
    batcher.apply(retired(action)[0])
    rest = batcher.decide(0.0)
    assert isinstance(rest, Retire)
    assert (rest.reason, [one.episode for one in rest.headers]) == (RetireReason.LOST, [action.headers[1].episode])
    batcher.apply(retired(rest)[0])
    assert isinstance(batcher.decide(0.0), Wait)


def test_mask_turns_old_tokens_into_context_and_counts_them() -> None:
    batcher = at(3, rules("mask", groups_per_step=1, max_lag=1))
    ready(batcher, 0, {1: 1, 2: 4, 3: 9})
    action = batcher.decide(0.0)
    assert isinstance(action, Train)
    assert (action.lag, action.oldest_allowed, action.masked_tokens, action.loss_tokens) == (1, 2, 2, 26)


def test_mask_retires_a_group_of_which_nothing_is_left() -> None:
    batcher = at(3, rules("mask", groups_per_step=1, max_lag=1))
    ready(batcher, 0, {0: 1, 1: 4})
    action = batcher.decide(0.0)
    assert isinstance(action, Retire)
    assert action.reason is RetireReason.STALE


def test_wait_holds_the_step_for_a_group_that_it_would_overtake_beyond_the_bound() -> None:
    batcher = at(1, rules("wait", groups_per_step=1, max_lag=1))
    batcher.apply(opened(0, start=0))
    ready(batcher, 1, {1: 4}, start=1)
    action = batcher.decide(5.0)
    assert isinstance(action, Wait)
    assert action.until == 65.0
    for member in range(2):
        batcher.apply(header(0, member, {0: 1}))
    batcher.apply(closed(0))
    action = batcher.decide(6.0)
    assert isinstance(action, Train)
    assert action.groups == (name(0),)


def test_wait_does_not_hold_the_step_for_a_group_that_has_time() -> None:
    batcher = at(0, rules("wait", groups_per_step=1, max_lag=1))
    batcher.apply(opened(0, start=0))
    ready(batcher, 1, {0: 4})
    assert isinstance(batcher.decide(5.0), Train)


def test_wait_looks_ahead_for_several_groups_with_the_same_deadline() -> None:
    batcher = at(1, rules("wait", groups_per_step=1, max_lag=2))
    for ordinal in (0, 1):
        batcher.apply(opened(ordinal, start=0))
    ready(batcher, 2, {1: 4}, start=1)
    assert isinstance(batcher.decide(0.0), Wait)


def test_a_group_that_blocks_too_long_is_retired_with_its_reason() -> None:
    batcher = at(1, rules("wait", groups_per_step=1, max_lag=1))
    batcher.apply(opened(0, start=0))
    batcher.apply(header(0, 1, {0: 1}))
    ready(batcher, 1, {1: 4}, start=1)
    assert isinstance(batcher.decide(0.0), Wait)
    assert isinstance(batcher.decide(59.0), Wait)
    action = batcher.decide(60.0)
    assert isinstance(action, Retire)
    assert (action.reason, action.group) == (RetireReason.TIMED_OUT, name(0))
    for fact in retired(action):
        batcher.apply(fact)
    assert isinstance(batcher.decide(60.0), Train)
    batcher.apply(header(0, 0, {0: 1}))
    late = batcher.decide(61.0)
    assert isinstance(late, Retire)
    assert late.reason is RetireReason.TIMED_OUT


def test_a_blocking_group_without_verdicts_times_out_too() -> None:
    batcher = at(1, rules("wait", groups_per_step=1, max_lag=1))
    batcher.apply(opened(0, start=0))
    ready(batcher, 1, {1: 4}, start=1)
    assert isinstance(batcher.decide(0.0), Wait)
    assert isinstance(batcher.decide(60.0), Train)
    batcher.apply(header(0, 0, {0: 1}))
    late = batcher.decide(61.0)
    assert isinstance(late, Retire)
    assert late.reason is RetireReason.TIMED_OUT


def test_a_batch_takes_all_that_is_ready_up_to_its_most() -> None:
    batcher = Batcher(rules(groups_per_step=2, groups_per_step_most=4))
    ready(batcher, 0)
    assert isinstance(batcher.decide(0.0), Wait)
    for ordinal in range(1, 6):
        ready(batcher, ordinal)
    action = batcher.decide(0.0)
    assert isinstance(action, Train)
    assert action.groups == tuple(name(ordinal) for ordinal in range(4))
    batcher.apply(trained(action))
    action = batcher.decide(0.0)
    assert isinstance(action, Train)
    assert action.groups == (name(4), name(5))


def test_larger_batches_leave_more_time_to_a_running_group() -> None:
    for most, held in ((0, True), (2, False)):
        batcher = at(1, rules("wait", groups_per_step=1, max_lag=2, groups_per_step_most=most))
        for ordinal in (0, 1):
            batcher.apply(opened(ordinal, start=0))
        ready(batcher, 2, {1: 4}, start=1)
        assert isinstance(batcher.decide(0.0), Wait) is held


def test_wait_leaves_nobody_behind_at_the_last_step() -> None:
    batcher = at(9, rules("wait", groups_per_step=1, max_lag=5, groups_per_step_most=2))
    batcher.apply(opened(0, start=9))
    ready(batcher, 1, {9: 4}, start=9)
    assert isinstance(batcher.decide(0.0), Wait)
    for member in range(2):
        batcher.apply(header(0, member, {9: 1}))
    batcher.apply(closed(0))
    action = batcher.decide(0.0)
    assert isinstance(action, Train)
    assert action.groups == (name(0), name(1))


def test_wait_never_holds_for_groups_that_nothing_can_save() -> None:
    batcher = at(1, rules("wait", groups_per_step=1, max_lag=1))
    ready(batcher, 0, {0: 1})
    ready(batcher, 1, {0: 1})
    assert isinstance(batcher.decide(0.0), Train)


def test_max_lag_zero_trains_only_what_the_newest_version_sampled() -> None:
    for mode in ("drop", "wait", "mask"):
        batcher = at(2, rules(mode, groups_per_step=1, max_lag=0))  # type: ignore[arg-type]
        ready(batcher, 0, {2: 3}, start=2)
        ready(batcher, 1, {1: 3}, start=1)
        first = batcher.decide(0.0)
        assert isinstance(first, Retire)
        assert first.group == name(1)
        for fact in retired(first):
            batcher.apply(fact)
        second = batcher.decide(0.0)
        assert isinstance(second, Train)
        assert second.lag == 0


def test_failed_slots_are_left_out_and_a_group_of_one_is_retired() -> None:
    batcher = Batcher(rules(groups_per_step=1))
    batcher.apply(opened(0, size=3))
    batcher.apply(header(0, 0))
    batcher.apply(header(0, 2))
    batcher.apply(closed(0, size=3, failed=(1,)))
    action = batcher.decide(0.0)
    assert isinstance(action, Train)
    assert action.episodes == (f"{name(0)}-0", f"{name(0)}-2")
    batcher.apply(trained(action))
    batcher.apply(opened(1))
    batcher.apply(header(1, 0))
    batcher.apply(closed(1, failed=(1,)))
    retire = batcher.decide(0.0)
    assert isinstance(retire, Retire)
    assert retire.reason is RetireReason.TOO_FEW


def test_a_group_that_failed_altogether_is_forgotten() -> None:
    batcher = Batcher(rules(groups_per_step=1))
    batcher.apply(opened(0))
    batcher.apply(closed(0, failed=(0, 1)))
    assert isinstance(batcher.decide(0.0), Wait)
    assert batcher.state.groups == {}


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"longest": 101}, RetireReason.TOO_LONG), ({"unsound": "log-prob -9999"}, RetireReason.INVALID)],
)
def test_what_cannot_be_trained_is_retired_with_its_reason(more: dict[str, int | str], reason: RetireReason) -> None:
    batcher = Batcher(rules(groups_per_step=1))
    ready(batcher, 0, **more)  # type: ignore[arg-type]
    action = batcher.decide(0.0)
    assert isinstance(action, Retire)
    assert action.reason is reason
    assert action.detail


def test_tokens_of_a_version_that_was_never_trained_are_invalid() -> None:
    batcher = Batcher(rules(groups_per_step=1))
    ready(batcher, 0, {1: 3})
    action = batcher.decide(0.0)
    assert isinstance(action, Retire)
    assert action.reason is RetireReason.INVALID


def test_groups_of_equal_rewards_are_trained_unless_they_are_to_be_refilled() -> None:
    batcher = Batcher(rules(groups_per_step=1))
    ready(batcher, 0, reward=1.0)
    assert isinstance(batcher.decide(0.0), Train)


def test_dynamic_sampling_refills_equal_rewards_up_to_its_cap() -> None:
    batcher = Batcher(rules(groups_per_step=1, dynamic_sampling=True, refills_per_step=2))
    for ordinal in range(4):
        ready(batcher, ordinal, reward=1.0)
    seen = []
    for _ in range(2):
        action = batcher.decide(0.0)
        assert isinstance(action, Retire)
        seen.append(action.reason)
        for fact in retired(action):
            batcher.apply(fact)
    assert seen == [RetireReason.ZERO_VARIANCE] * 2
    action = batcher.decide(0.0)
    assert isinstance(action, Train)
    batcher.apply(trained(action))
    assert isinstance(batcher.decide(0.0), Retire)


def test_eval_groups_are_no_business_of_the_batcher() -> None:
    batcher = Batcher(rules(groups_per_step=1))
    batcher.apply(msgspec.structs.replace(opened(0), purpose="eval"))
    batcher.apply(closed(0))
    assert isinstance(batcher.decide(0.0), Wait)
    assert batcher.state.groups == {}


def test_what_is_left_after_the_last_step_is_retired_as_not_needed_even_if_it_comes_late() -> None:
    batcher = at(10, rules())
    batcher.apply(opened(0))
    batcher.apply(header(0, 0, {9: 1}))
    first = batcher.decide(0.0)
    assert isinstance(first, Retire)
    assert first.reason is RetireReason.NOT_NEEDED
    for fact in retired(first):
        batcher.apply(fact)
    assert isinstance(batcher.decide(0.0), Done)
    batcher.apply(header(0, 1, {9: 1}))
    late = batcher.decide(0.0)
    assert isinstance(late, Retire)
    assert late.reason is RetireReason.NOT_NEEDED
