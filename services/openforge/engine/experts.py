"""The second half of a layer: one network for all tokens, or a router that picks a few of many for each.

Promises: in float32 the numbers of the reference implementation up to rounding; of linear maps with `block`, the same
bits for a token whatever tokens are beside it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import silu

from openforge.engine.linear import Linear


class Network(NamedTuple):
    """`down(silu(gate(x)) * up(x))`; gate and up are one map."""

    gate_up: Linear
    down: Linear

    def inner(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x_TD).chunk(2, dim=-1)
        return silu(gate).mul_(up)

    def plus(self, x_TD: torch.Tensor, other_TD: torch.Tensor) -> torch.Tensor:
        """`self(x) + other`."""
        return self.down.plus(self.inner(x_TD), other_TD)


class Mixture(NamedTuple):
    """The `per_token` experts with the highest probability, each weighted by it; `normalised`: to 1 in sum."""

    router: Linear
    experts: Sequence[Network]
    per_token: int
    normalised: bool

    def plus(self, x_TD: torch.Tensor, other_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`self(x) + other`, and which experts were chosen (T, per token)."""
        weights_Tk, chosen_Tk = self.router(x_TD).float().softmax(-1).topk(self.per_token)
        if self.normalised:
            weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
        weights_Tk = weights_Tk.to(x_TD.dtype)
        result_TD = other_TD.clone()
        for expert in chosen_Tk.unique().tolist():  # in this order for every token
            tokens, places = (chosen_Tk == expert).nonzero(as_tuple=True)
            network = self.experts[expert]
            said = network.down(network.inner(x_TD[tokens]))
            result_TD.index_add_(0, tokens, said * weights_Tk[tokens, places, None])
        return result_TD, chosen_Tk
