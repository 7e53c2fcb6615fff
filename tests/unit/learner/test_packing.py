"""Rows share prefixes and change nothing: log-probs and gradients are those of the sequences alone."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from openforge.learner.backends.forward import PolicyForward, RowTensors, sequence_index
from openforge.learner.backends.ranks import PAIR_COST, balanced
from openforge.learner.bins import RowTooShort
from openforge.learner.packing import TrainSequence, cost, pack

VOCABULARY = 61


def sequence(ids: list[int], at: list[int], *, advantage: float = 1.0, temperature: float = 1.0) -> TrainSequence:
    return TrainSequence(
        ids_T=ids,
        at_K=at,
        mu_logprobs_K=[-1.0 - position for position in at],
        advantage=advantage,
        weight=0.5,
        temperature=temperature,
    )


def group(
    rng: random.Random, prompt: int, members: int, answer: int, head: list[int] | None = None
) -> list[TrainSequence]:
    shared = [*(head or []), *(rng.randrange(VOCABULARY) for _ in range(prompt))]
    return [
        sequence(
            [*shared, *(rng.randrange(VOCABULARY) for _ in range(length))],
            list(range(len(shared), len(shared) + length)),
            advantage=rng.gauss(0, 1),
        )
        for length in (rng.randint(1, answer) for _ in range(members))
    ]


def several_turns(rng: random.Random) -> TrainSequence:
    ids = [rng.randrange(VOCABULARY) for _ in range(40)]
    return sequence(ids, [*range(7, 12), *range(20, 23), *range(31, 38)], advantage=rng.gauss(0, 1), temperature=0.7)


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).float()


def logprobs_alone(model: LlamaForCausalLM, one: TrainSequence) -> torch.Tensor:
    logits_TV = model(torch.tensor([one.ids_T])).logits[0] / one.temperature
    return torch.stack([logits_TV[at - 1].log_softmax(-1)[one.ids_T[at]] for at in one.at_K])


def logprobs_packed(
    model: LlamaForCausalLM, sequences: list[TrainSequence], row_tokens: int, *, by_plan: bool = True
) -> dict[tuple[int, int], torch.Tensor]:
    policy, found = PolicyForward(model), {}
    policy.by_plan = by_plan
    for row in pack(sequences, row_tokens):
        logprobs_N = policy(RowTensors.of(row, "cpu"))
        found |= {slot: logprobs_N[n] for n, slot in enumerate(row.slot_N)}
    return found


def mixed(seed: int) -> list[TrainSequence]:
    rng = random.Random(seed)
    head = [rng.randrange(VOCABULARY) for _ in range(9)]
    groups = [one for _ in range(4) for one in group(rng, 12, 5, 9, head)]
    turns = several_turns(rng)
    branch = sequence([*turns.ids_T[:23], 5, 6, 7, 8], [*range(20, 23), 25, 26], advantage=-0.3, temperature=0.7)
    twin = sequence(list(groups[0].ids_T), list(groups[0].at_K), advantage=-1.0)
    return [*groups, turns, branch, twin, sequence([3, 4], [1]), sequence([1, 2, 3], [])]


@pytest.mark.parametrize("by_plan", [True, False], ids=["planned", "masked"])
@pytest.mark.parametrize("row_tokens", [40, 64, 2048])
def test_packed_logprobs_equal_those_of_each_sequence_alone(row_tokens: int, by_plan: bool) -> None:
    model, sequences = tiny(), mixed(1)
    packed = logprobs_packed(model, sequences, row_tokens, by_plan=by_plan)
    for index, one in enumerate(sequences):
        if not one.at_K:
            continue
        alone = logprobs_alone(model, one)
        together = torch.stack([packed[index, offset] for offset in range(len(one.at_K))])
        assert (alone - together).abs().max().item() < 1e-5


@pytest.mark.parametrize("row_tokens", [40, 2048])
def test_packed_gradients_equal_those_of_each_sequence_alone(row_tokens: int) -> None:
    alone, packed, sequences = tiny(), tiny(), mixed(2)
    sum(-(one.advantage * one.weight) * logprobs_alone(alone, one).sum() for one in sequences if one.at_K).backward()
    for row in pack(sequences, row_tokens):
        tensors = RowTensors.of(row, "cpu")
        logprobs_N = PolicyForward(packed)(tensors)
        (-(tensors.advantage_N * tensors.weight_N) * logprobs_N).sum().backward()
    for left, right in zip(alone.parameters(), packed.parameters(), strict=True):
        assert (left.grad - right.grad).abs().max().item() < 1e-5 * max(1.0, left.grad.abs().max().item())


def test_under_bfloat16_autocast_planned_rows_are_close_to_masked_ones() -> None:
    sequences, found = mixed(2), []
    for by_plan in (True, False):
        model = tiny()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logprobs = logprobs_packed(model, sequences, 2048, by_plan=by_plan)
        torch.stack([logprobs[slot] for slot in sorted(logprobs)]).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for planned, masked in zip(*found, strict=True):
        assert planned.dtype == torch.float32
        assert (planned - masked).norm() < 0.05 * masked.norm()


def test_a_token_sees_no_neighbour_in_its_row() -> None:
    model, rng = tiny(), random.Random(3)
    first, second = group(rng, 10, 2, 8)
    other = sequence([*second.ids_T[:-2], 1, 2], second.at_K)
    before = logprobs_packed(model, [first, second], 2048)
    after = logprobs_packed(model, [first, other], 2048)
    assert all(torch.equal(before[0, offset], after[0, offset]) for offset in range(len(first.at_K)))


def test_the_token_at_a_position_is_predicted_one_before_it() -> None:
    (row,) = pack([sequence([10, 11, 12], [1, 2])], 8)
    assert (row.ids_T, row.predictor_N, row.target_N) == ([10, 11], [0, 1], [11, 12])
    assert row.mu_logprobs_N == [-2.0, -3.0]


def test_a_group_costs_its_prompt_once() -> None:
    sequences = group(random.Random(4), 240, 8, 20)
    (row,) = pack(sequences, 2048)
    assert len(row.ids_T) <= 240 + sum(len(one.at_K) for one in sequences)


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    with pytest.raises(RowTooShort, match="row_tokens = 4"):
        pack([sequence([1, 2, 3, 4, 5, 6], [5])], 4)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.integers(41, 200), st.integers(0, 200))
def test_every_loss_token_is_in_exactly_one_row_and_rows_keep_their_bound(
    seed: int, row_tokens: int, fill: int
) -> None:
    sequences = mixed(seed)
    rows = pack(sequences, row_tokens, fill)
    slots = sorted(slot for row in rows for slot in row.slot_N)
    assert slots == [(index, offset) for index, one in enumerate(sequences) for offset in range(len(one.at_K))]
    for row in rows:
        assert len(row.ids_T) <= row_tokens
        for n, (index, offset) in enumerate(row.slot_N):
            at = sequences[index].at_K[offset]
            ancestors = [i for i in range(row.predictor_N[n] + 1) if row.predictor_N[n] < row.end_T[i]]
            assert [row.ids_T[i] for i in ancestors] == sequences[index].ids_T[:at]
            assert [row.position_T[i] for i in ancestors] == list(range(at))
            assert row.target_N[n] == sequences[index].ids_T[at]


def test_ranks_have_the_same_to_compute_attention_included() -> None:
    rng = random.Random(0)
    lengths = [max(4, min(int(rng.lognormvariate(5.7, 1.0)), 2048)) for _ in range(256)]
    sequences = [
        sequence([index, *(rng.randrange(VOCABULARY) for _ in range(n))], [n]) for index, n in enumerate(lengths)
    ]
    rows = pack(sequences, 2048)
    assert sum(len(row.ids_T) for row in rows) / (2048 * len(rows)) > 0.97
    for world in (2, 8):
        shares = balanced(pack(sequences, 2048, ranks=world), world)
        loads = [sum(cost(row, PAIR_COST) for row in part) for part in shares]
        assert len({len(part) for part in shares}) == 1
        assert max(loads) < 1.1 * sum(loads) / world


@pytest.mark.parametrize("head", [1, 60])
def test_what_all_sequences_begin_with_costs_no_fill(head: int) -> None:
    """A begin-of-text token or a common instruction joins all sequences, but is no reason to leave rows half empty."""
    rng = random.Random(0)
    common = [rng.randrange(VOCABULARY) for _ in range(head)]
    lengths = [max(4, min(int(rng.lognormvariate(5.7, 1.0)), 2048 - head)) for _ in range(256)]
    sequences = [sequence([*common, *(rng.randrange(VOCABULARY) for _ in range(n))], [head + n - 1]) for n in lengths]
    rows = pack(sequences, 2048)
    assert sum(len(row.ids_T) for row in rows) / (2048 * len(rows)) > 0.97
    assert sum(len(row.ids_T) for row in rows) <= sum(lengths) + head * len(rows)
    assert len(pack(sequences, 2048, ranks=8)) % 8 == 0


def test_groups_stay_whole_where_all_begin_alike() -> None:
    """Rows are not filled at the price of computing a group's prompt twice."""
    rng = random.Random(6)
    common = [rng.randrange(VOCABULARY) for _ in range(30)]
    groups = [group(rng, 300, 8, 40, common) for _ in range(24)]
    rows = pack([one for own in groups for one in own], 2048)
    for own in range(len(groups)):
        assert sum(any(index // 8 == own for index, _ in row.slot_N) for row in rows) == 1


def test_a_group_that_no_row_holds_repeats_its_prompt_as_seldom_as_can_be() -> None:
    rng = random.Random(7)
    prompt = [rng.randrange(VOCABULARY) for _ in range(1000)]
    sequences = [
        sequence([*prompt, *(rng.randrange(VOCABULARY) for _ in range(n))], [1000 + n - 1])
        for n in (500, 500, 490, 540, 300, 740, 100, 900)
    ]
    rows = pack(sequences, 2048)
    assert len(rows) == 4
    assert [len(row.ids_T) <= 2048 for row in rows] == [True] * 4


def test_one_tree_is_one_row_however_many_ranks_there_are() -> None:
    assert len(pack(group(random.Random(4), 24, 8, 20), 2048, ranks=4)) == 1


def test_the_tokens_of_a_sequence_stand_together_in_one_row() -> None:
    """What looks at whole sequences (GSPO, sequence weights, GAE) relies on it."""
    sequences = mixed(5)
    for row in pack(sequences, 64):
        runs = [sequence for n, (sequence, _) in enumerate(row.slot_N) if n == 0 or row.slot_N[n - 1][0] != sequence]
        assert len(runs) == len(set(runs))
        assert list(sequence_index(row)) == [runs.index(sequence) for sequence, _ in row.slot_N]
        for run in runs:
            offsets = [offset for sequence, offset in row.slot_N if sequence == run]
            assert offsets == list(range(len(sequences[run].at_K)))
