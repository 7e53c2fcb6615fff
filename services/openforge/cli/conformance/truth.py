"""Whether what was recorded is true: one attempt's record against a full float32 forward pass and its conversation.

Promises: the log-probs are computed anew by the reference implementation, nothing cached; a sequence that does not
read as the conversation, or a sampled token that stands nowhere or twice, is named.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from openforge.chat.canonical import answer_key, chain_of
from openforge.chat.chatml import CLOSE, OPEN, parse_hermes, split_reasoning
from openforge.chat.contract import Message, Renderer, Tool
from openforge.protos import Sequence as TrainingSequence
from openforge.protos import TrajectoryVerified, TurnRecorded, unpack_ids, unpack_logprobs
from openforge.tokens import Conversation, rebuild

_ROWS = 2048
"""How many positions get their distribution at once: a row has a number for each word of the vocabulary."""


class Told(msgspec.Struct, frozen=True):
    """What the harness sent and was told in a turn."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    reply: Message


def worst_difference(weights: Path, trajectory: TrajectoryVerified) -> float:
    """The largest |recorded - recomputed| over all trained tokens."""
    differences = [_difference(weights, sequence, trajectory.temperature) for sequence in trajectory.sequences]
    return max(differences, default=0.0)


def _difference(weights: Path, sequence: TrainingSequence, temperature: float) -> float:
    import torch

    ids = unpack_ids(sequence.ids)
    positions = [at for span in sequence.loss for at in range(span.start, span.start + span.length)]
    recorded = torch.tensor(unpack_logprobs(sequence.logprobs))
    model = _model(weights)
    with torch.inference_mode():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
        worst = 0.0
        for first in range(0, len(positions), _ROWS):
            chosen = torch.tensor(positions[first : first + _ROWS])
            logits = model.lm_head(hidden[chosen - 1]).float() / temperature
            picked = logits.log_softmax(-1).gather(1, torch.tensor(ids)[chosen][:, None])[:, 0]
            worst = max(worst, float((picked - recorded[first : first + _ROWS]).abs().max()))
    return worst


@lru_cache(maxsize=1)
def _model(weights: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()


class Reading:
    """Reads ids as the turns of a conversation."""

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._generation = len(renderer.render((), ()))

    def misread(self, trajectory: TrajectoryVerified, turns: Sequence[TurnRecorded]) -> Iterator[str]:
        """Where a sequence, decoded, is not the conversation that the harness had."""
        conversation = rebuild(turns)
        told = conversations(conversation)
        for sequence in trajectory.sequences:
            leaf = next(turn.fact.turn for turn in conversation if turn.ids == sequence.ids)
            spoken = told[leaf]
            wanted = self._renderer.render((*spoken.messages, spoken.reply), spoken.tools)[: -self._generation]
            for complaint in _unequal(self._turns(wanted), self._turns(unpack_ids(sequence.ids))):
                yield f"turn {leaf}: {complaint}"

    def _turns(self, ids: Sequence[int]) -> list[tuple[str, str]]:
        """Roles and texts, as the special tokens divide them."""
        text = str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        pieces = [piece.partition("\n") for piece in text.split(OPEN)[1:]]
        return [(role, content.removesuffix("\n").removesuffix(CLOSE)) for role, _, content in pieces]


def conversations(conversation: Conversation) -> dict[int, Told]:
    """What each turn's whole conversation was, from facts that hold only differences."""
    told: dict[int, Told] = {}
    for turn in conversation:
        fact = turn.fact
        parent = told.get(fact.parent) if fact.parent is not None else None
        before = (*parent.messages, parent.reply)[: fact.kept] if parent else ()
        added = msgspec.json.decode(fact.messages or b"[]", type=tuple[Message, ...])
        tools = msgspec.json.decode(fact.tools, type=tuple[Tool, ...]) if fact.tools else parent and parent.tools
        reply = msgspec.json.decode(fact.reply, type=Message)
        told[fact.turn] = Told((*before, *added), tools or (), reply)
    return told


def _unequal(wanted: list[tuple[str, str]], found: list[tuple[str, str]]) -> Iterator[str]:
    """Turn by turn: what others said must be equal letter by letter, what the model said in its meaning."""
    if [role for role, _ in wanted] != [role for role, _ in found]:
        yield "the sequence has other turns than the conversation"
        return
    for number, ((role, told), (_, text)) in enumerate(zip(wanted, found, strict=True)):
        same = _meaning(told) == _meaning(text) if role == "assistant" else told == text
        if not same:
            yield f"message {number} ({role}) reads {text[:60]!r}, told was {told[:60]!r}"


def _meaning(text: str) -> bytes:
    reasoning, rest = split_reasoning(text)
    parsed = parse_hermes(rest, set())
    said = Message(role="assistant", content=parsed.content, reasoning=reasoning, tool_calls=parsed.tool_calls)
    return chain_of([said]).value


def unaccounted(trajectory: TrajectoryVerified, turns: Sequence[TurnRecorded]) -> Iterator[str]:
    """Sampled tokens that are trained twice, neither trained nor dropped with a reason, trained though not used, or
    not trained though used.
    """
    trained = Counter(turn for sequence in trajectory.sequences for turn in sequence.turns)
    for turn, times in trained.items():
        if times > 1:
            yield f"turn {turn} stands in {times} sequences"
    conversation = rebuild(turns)
    yield from _trained_beside(trained.keys(), conversation)
    yield from _lost(trained.keys(), conversation)
    delivered = sum(span.length for sequence in trajectory.sequences for span in sequence.loss)
    dropped = sum(entry.tokens for entry in trajectory.dropped)
    sampled = sum(len(turn.sampled) // 4 for turn in turns)
    if delivered + dropped != sampled:
        yield f"{sampled} tokens were sampled, {delivered} are trained and {dropped} dropped with a reason"


def _trained_beside(trained: Collection[int], conversation: Conversation) -> Iterator[str]:
    """Trained answers that nothing went on from, beside another trained answer to the same call."""
    facts = [turn.fact for turn in conversation]
    length = {turn.fact.turn: turn.length for turn in conversation}
    used = {fact.parent for fact in facts if fact.parent is not None and fact.prefix == length[fact.parent]}
    for fact in facts:
        twins = [other.turn for other in facts if other.digest == fact.digest and other is not fact]
        beside = [twin for twin in twins if twin in trained]
        if fact.digest and fact.turn in trained and fact.turn not in used and beside:
            yield f"turn {fact.turn} is trained beside turn {beside[0]}, the same call sent again"


def _lost(trained: Collection[int], conversation: Conversation) -> Iterator[str]:
    """Answers that the harness gave back with a later call, so that it used them, and that are trained nowhere."""
    told = conversations(conversation)
    given_back = {
        answer_key(message) for turn in told.values() for message in turn.messages if message.role == "assistant"
    }
    kept = {answer_key(told[turn].reply) for turn in trained}
    for turn in conversation:
        key = answer_key(told[turn.fact.turn].reply)
        if turn.sampled_length and key in given_back - kept:
            yield f"turn {turn.fact.turn} was used and is not trained"
