"""Log-probs of the loss tokens of a row.

Promises: attention follows the row's forest and nothing else; the language-model head runs only where a
loss token is predicted; logits are divided by the temperature they were sampled at, and the
normalisation is in float32 whatever the rest is computed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openforge.learner.backends import replay, tree_attention
from openforge.learner.packing import Row


class RowTensors(NamedTuple):
    """A row on a device. T tokens, P places that predict (each at one temperature), N loss tokens.

    Loss token n is predicted at place `at_N[n]` and belongs to the row's sequence `sequence_N[n]`, counted from 0.
    `routed_TLk` are the experts that were recorded, -1 where none were.
    """

    ids_1T: Tensor
    positions_1T: Tensor
    ends_T: Tensor
    predictors_P: Tensor
    temperature_P: Tensor
    at_N: Tensor
    targets_N: Tensor
    mu_logprobs_N: Tensor
    advantage_N: Tensor
    weight_N: Tensor
    sequence_N: Tensor
    routed_TLk: Tensor | None = None

    @classmethod
    def of(cls, row: Row, device: str | torch.device) -> RowTensors:
        def whole(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        def real(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        places = sorted(set(zip(row.predictor_N, row.temperature_N, strict=True)))
        index_of = {place: index for index, place in enumerate(places)}
        at_N = [index_of[place] for place in zip(row.predictor_N, row.temperature_N, strict=True)]
        return cls(
            ids_1T=whole(row.ids_T)[None],
            positions_1T=whole(row.position_T)[None],
            ends_T=whole(row.end_T),
            predictors_P=whole([predictor for predictor, _ in places]),
            temperature_P=real([temperature for _, temperature in places]),
            at_N=whole(at_N),
            targets_N=whole(row.target_N),
            mu_logprobs_N=real(row.mu_logprobs_N),
            advantage_N=real(row.advantage_N),
            weight_N=real(row.weight_N),
            sequence_N=whole(list(sequence_index(row))),
            routed_TLk=None if row.routing is None else torch.tensor(row.routing.rows(), device=device),
        )

    def by_own_choice(self) -> RowTensors:
        """For another model, which sends tokens where it likes."""
        return self._replace(routed_TLk=None)


def sequence_index(row: Row) -> Iterator[int]:
    """For each loss token the index of its sequence within the row. The tokens of a sequence stand together."""
    last, index = -1, -1
    for sequence, _ in row.slot_N:
        index += sequence != last
        last = sequence
        yield index


def _mask(ends_T: Tensor) -> Tensor:
    """Token i sees token j where j is i or an ancestor of i: j <= i < end of j."""
    index_T = torch.arange(len(ends_T), device=ends_T.device)
    return (index_T[None, :] <= index_T[:, None]) & (index_T[:, None] < ends_T[None, :])


class RowForward(nn.Module):  # type: ignore[misc]
    """A causal language model of transformers, asked what its head says at the places of a row."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        on_cpu = next(model.parameters()).device.type == "cpu"
        self.by_plan = on_cpu and tree_attention.equip(model)

    def at_places(self, row: RowTensors) -> Tensor:
        """(P, V) logits."""
        replayed = {} if row.routed_TLk is None else {replay.ASKED: row.routed_TLk}
        logits_PV: Tensor = self.model(
            input_ids=row.ids_1T,
            position_ids=row.positions_1T,
            **self._attention(row),
            **replayed,
            logits_to_keep=row.predictors_P,
            use_cache=False,
        ).logits[0]
        return logits_PV

    def _attention(self, row: RowTensors) -> dict[str, Any]:
        """On a CPU only what the mask leaves is computed; elsewhere one masked square is quicker."""
        if self.by_plan:
            return {"tree_plan": tree_attention.plan_of(row.ends_T)}
        return {"attention_mask": _mask(row.ends_T)[None, None]}


class PolicyForward(RowForward):
    def forward(self, row: RowTensors) -> Tensor:
        """logprobs_N."""
        logits_PV = self.at_places(row)
        if not bool((row.temperature_P == 1.0).all()):
            logits_PV = logits_PV / row.temperature_P[:, None]
        return logits_PV.float().log_softmax(-1)[row.at_N, row.targets_N]


class ValueForward(RowForward):
    """A model of the same architecture with one number in the place of the language-model head; at first 0."""

    def __init__(self, model: Any) -> None:
        head = nn.Linear(model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        model.set_output_embeddings(head.to(next(model.parameters()).device))
        super().__init__(model)

    def forward(self, row: RowTensors) -> Tensor:
        """values_N: what is expected before each loss token is sampled."""
        return self.at_places(row.by_own_choice()).float()[row.at_N, 0]
