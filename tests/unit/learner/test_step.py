"""From trajectories to what is trained: advantages belong to episodes, losses to their sampled tokens."""

import random
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest
from learner_world import run_config, verdict

from openforge.learner.step import Step, batch_of, step_of
from openforge.learner.trajectories import header_of
from openforge.protos import Sequence, Span, TrajectoryVerified, VersionSpan, pack_ids, pack_logprobs
from openforge.runs.config import AlgorithmSection

VOCABULARY = 259


def episode(ordinal: int, member: int, reward: float, branches: list[int], version: int = 0) -> TrajectoryVerified:
    """An episode whose branches sampled so many tokens."""
    like = verdict(run_config(Path("/none")), ordinal, member, version, reward=reward)
    rng = random.Random(f"{ordinal} {member}")

    def branch(tokens: int) -> Sequence:
        ids = [rng.randrange(3, VOCABULARY) for _ in range(5 + tokens)]
        return Sequence(
            ids=pack_ids(ids),
            loss=(Span(5, tokens),),
            logprobs=pack_logprobs([-rng.uniform(0.1, 2.0) for _ in range(tokens)]),
            versions=(VersionSpan(5, tokens, version),),
            turns=(0,),
        )

    return msgspec.structs.replace(like, sequences=tuple(map(branch, branches)), sampled_tokens=sum(branches))


def step(trajectories: list[TrajectoryVerified], **algorithm: object) -> Step:
    groups = list(dict.fromkeys(one.group for one in trajectories))
    batch = batch_of(0, groups, {one.episode: one for one in trajectories}, 0)
    return step_of(batch, AlgorithmSection(**algorithm), VOCABULARY)  # type: ignore[arg-type]


def pull(made: Step, trajectories: list[TrajectoryVerified]) -> dict[str, float]:
    """What each episode adds to the loss's weights, times its advantage."""
    owners = [one.episode for one in trajectories for _ in one.sequences]
    found: dict[str, float] = defaultdict(float)
    for owner, sequence in zip(owners, made.sequences, strict=True):
        found[owner] += sequence.weight * len(sequence.at_K) * sequence.advantage
    return dict(found)


def test_all_branches_of_an_episode_have_its_advantage() -> None:
    made = step([episode(0, 0, 1.0, [4, 9, 2]), episode(0, 1, 0.0, [3])])
    assert len({sequence.advantage for sequence in made.sequences[:3]}) == 1
    assert made.sequences[0].advantage == -made.sequences[3].advantage > 0


def test_branches_do_not_count_as_members_of_the_group() -> None:
    branched = step([episode(0, 0, 1.0, [4, 9, 2]), episode(0, 1, 0.0, [3]), episode(0, 2, 0.5, [3])])
    plain = step([episode(0, 0, 1.0, [4]), episode(0, 1, 0.0, [3]), episode(0, 2, 0.5, [3])])
    assert branched.sequences[0].advantage == plain.sequences[0].advantage


def test_episodes_pull_alike_in_episode_mean_however_long_and_branched() -> None:
    mine = [episode(0, 0, 1.0, [40, 9, 2]), episode(0, 1, 0.0, [3])]
    assert list(pull(step(mine, aggregation="episode_mean"), mine).values()) == pytest.approx(
        list(
            pull(
                step([episode(0, 0, 1.0, [1]), episode(0, 1, 0.0, [3])], aggregation="episode_mean"),
                [episode(0, 0, 1.0, [1]), episode(0, 1, 0.0, [3])],
            ).values()
        )
    )
    assert sum(pull(step(mine, aggregation="episode_mean"), mine).values()) == pytest.approx(0.0)


def test_groups_of_unequal_size_stand_side_by_side() -> None:
    mine = [
        *(episode(0, member, float(member), [3]) for member in range(2)),
        *(episode(1, member, float(member == 0), [2, 2]) for member in range(5)),
    ]
    made = step(mine, advantage="dr_grpo")
    by_owner = dict(zip([one.episode for one in mine for _ in one.sequences], made.sequences, strict=True))
    assert [by_owner[one.episode].advantage for one in mine] == pytest.approx([-0.5, 0.5, 0.8, -0.2, -0.2, -0.2, -0.2])


def test_a_group_from_which_one_member_is_left_teaches_nothing() -> None:
    made = step([episode(0, 0, 0.7, [4])])
    assert made.sequences[0].advantage == 0.0
    assert made.zero_variance_groups == 1


def test_of_which_versions_its_tokens_are_changes_no_advantage_of_a_group() -> None:
    rewards, versions = (1.0, 0.0, 0.5), (0, 1, 3)
    alike = step([episode(0, member, reward, [4]) for member, reward in enumerate(rewards)])
    mixed = step(
        [
            episode(0, member, reward, [4], version)
            for member, (reward, version) in enumerate(zip(rewards, versions, strict=True))
        ]
    )
    assert [one.advantage for one in mixed.sequences] == [one.advantage for one in alike.sequences]
    assert alike.sequences[0].advantage > 0


def test_a_masked_token_in_the_middle_is_as_if_it_were_not_there_to_train() -> None:
    whole = episode(0, 0, 1.0, [6])
    (sequence,) = whole.sequences
    logprobs = [-0.1, -0.2, -0.4, -0.5]
    holed = msgspec.structs.replace(
        sequence,
        loss=(Span(5, 2), Span(8, 2)),
        logprobs=pack_logprobs(logprobs),
        versions=(VersionSpan(5, 6, 0),),
    )
    other = episode(0, 1, 0.0, [3])
    made = step([msgspec.structs.replace(whole, sequences=(holed,)), other])
    assert made.sequences[0].at_K == [5, 6, 8, 9]
    assert made.sequences[0].mu_logprobs_K == pytest.approx(logprobs)
    assert made.loss_tokens == 4 + 3
    assert made.sequences[0].weight == pytest.approx(1 / 7)


def test_a_mini_batch_holds_whole_groups_and_its_weights_sum_to_one() -> None:
    mine = [episode(ordinal, member, float(member), [3 + ordinal, 2]) for ordinal in range(5) for member in range(3)]
    made = step(mine, mini_batches=2)
    parts = [sequence.part for sequence in made.sequences]
    assert parts == [ordinal % 2 for ordinal in range(5) for _ in range(3 * 2)]
    for part in (0, 1):
        own = [sequence for sequence in made.sequences if sequence.part == part]
        assert sum(one.weight * len(one.at_K) for one in own) == pytest.approx(1.0)


def test_a_reward_is_shaped_before_it_is_compared_and_reported_as_it_was() -> None:
    mine = [episode(0, 0, 1.0, [60, 35]), episode(0, 1, 1.0, [10])]
    made = step(mine, advantage="dr_grpo", overlong_tokens=100, overlong_buffer=20)
    assert [sequence.advantage for sequence in made.sequences] == pytest.approx([-0.375, -0.375, 0.375])
    assert made.reward_mean == 1.0
    assert made.metrics["overlong_episodes"] == 1.0
    assert made.metrics["overlong_penalty_mean"] == pytest.approx(0.375)


def test_a_critic_gets_the_reward_and_no_advantage() -> None:
    made = step([episode(0, 0, 1.0, [4]), episode(0, 1, 0.0, [3])], advantage="gae")
    assert [(one.reward, one.advantage) for one in made.sequences] == [(1.0, 0.0), (0.0, 0.0)]


def test_images_are_carried_to_the_batch() -> None:
    whole = episode(0, 0, 1.0, [4])
    with_more = msgspec.structs.replace(whole.sequences[0], images=("cd" * 32,))
    made = step([msgspec.structs.replace(whole, sequences=(with_more,)), episode(0, 1, 0.0, [3])])
    assert [one.images for one in made.sequences] == [("cd" * 32,), ()]


def test_a_backend_that_takes_text_alone_refuses_images_with_a_sentence() -> None:
    whole = episode(0, 0, 1.0, [4])
    pictured = msgspec.structs.replace(
        whole, sequences=(msgspec.structs.replace(whole.sequences[0], images=("cd" * 32,)),)
    )
    assert header_of(pictured, VOCABULARY).unsound == (
        "1 images belong to its tokens, and the learner's backend takes text alone"
    )
    assert header_of(pictured, VOCABULARY, frozenset({"images"})).unsound == ""


def test_with_completion_weights_each_task_counts_as_it_was_started() -> None:
    whole = [episode(0, member, float(member % 2), [4]) for member in range(4)]
    half = [episode(1, member, float(member % 2), [4]) for member in range(2)]
    batch = batch_of(0, ["g000000", "g000001"], {one.episode: one for one in [*whole, *half]}, 0, group_size=4)
    made = step_of(batch, AlgorithmSection(), VOCABULARY)
    weight = [sequence.weight * len(sequence.at_K) for sequence in made.sequences]
    assert sum(weight[:4]) == pytest.approx(sum(weight[4:])) == pytest.approx(0.5)
    assert made.metrics["completion_effective"] == pytest.approx(8**2 / (4 * 1 + 2 * 4))
    plain = step_of(msgspec.structs.replace(batch, group_size=0), AlgorithmSection(), VOCABULARY)
    assert sum(s.weight * len(s.at_K) for s in plain.sequences[4:]) == pytest.approx(1 / 3)
    assert "completion_effective" not in plain.metrics
