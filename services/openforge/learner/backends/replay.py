"""Sends the tokens of a row through the experts that were recorded, in transformers' mixtures.

Only the choice is replayed: the experts' weights are computed anew from what the router says of them now, so the
gradient reaches the router. That is rollout routing replay, R3 (arXiv 2510.11370).

Promises: a token of which nothing is known goes where the router sends it; a call without `routed_experts` is what it
was before; a model whose routers weigh experts in a way that is not known here is refused, by trying each of them.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from openforge.learner.backends.contract import BackendRefused
from openforge.learner.routing import Mixture

ASKED = "routed_experts"
"""What the model is called with, and hands to its layers: (T, layers, experts per token), -1 where nothing is known."""

_TRIED = 64


class _Choice:
    """What a layer hands to its router. Set at each call of the layer, so also where activations are recomputed."""

    experts_Tk: Tensor | None = None


def equip(model: Any) -> Mixture:
    """Let the model replay; raises `BackendRefused` where it cannot."""
    layers = model.get_decoder().layers
    mixtures = set()
    for index, layer in enumerate(layers):
        for router in (module for module in layer.modules() if type(module).__name__.endswith("TopKRouter")):
            experts, per_token, normalised = _tried(router)
            mixtures.add(Mixture(len(layers), experts, per_token))
            choice = _Choice()
            layer.register_forward_pre_hook(partial(_hand, choice, index), with_kwargs=True)
            router.register_forward_hook(partial(_replay, choice, normalised))
    if len(mixtures) != 1:
        kind = model.config.model_type
        found = "no router" if not mixtures else "routers of several kinds"
        raise BackendRefused(
            f"learner.routing_replay = true: transformers' {kind!r} has {found} whose choice could be replayed; write "
            "false, or train a mixture of experts such as qwen3_moe, mixtral or olmoe."
        )
    return mixtures.pop()


def _hand(choice: _Choice, index: int, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    routed_TLk = kwargs.get(ASKED)
    choice.experts_Tk = None if routed_TLk is None else routed_TLk[:, index].long()


def _replay(choice: _Choice, normalised: bool, router: nn.Module, args: Any, said: tuple[Tensor, ...]) -> Any:
    if choice.experts_Tk is None:
        return None
    logits_TE, weights_Tk, own_Tk, *more = said
    known_T1 = choice.experts_Tk[:, :1] >= 0
    experts_Tk = torch.where(known_T1, choice.experts_Tk, own_Tk)
    return logits_TE, _weights(logits_TE, experts_Tk, normalised).to(weights_Tk.dtype), experts_Tk, *more


def _weights(logits_TE: Tensor, experts_Tk: Tensor, normalised: bool) -> Tensor:
    """Normalised ones as a softmax over these alone: the same numbers, also where other experts are far likelier."""
    if normalised:
        return logits_TE.float().gather(-1, experts_Tk).softmax(-1)
    return logits_TE.float().softmax(-1).gather(-1, experts_Tk)


def _tried(router: Any) -> tuple[int, int, bool]:
    """How many experts it has, how many it takes, and whether their weights are normalised to 1 in sum."""
    weight = router.weight
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randn(_TRIED, weight.shape[-1], generator=drawn).to(weight)
    with torch.no_grad(), suppress(TypeError, RuntimeError):  # others want more than tokens, or say something else
        logits_TE, weights_Tk, experts_Tk = router(tokens)
        for normalised in (True, False):
            ours = _weights(logits_TE, experts_Tk, normalised)
            if ours.shape == weights_Tk.shape and torch.allclose(ours, weights_Tk, rtol=1e-4):
                return logits_TE.shape[-1], experts_Tk.shape[-1], normalised
    raise BackendRefused(
        f"learner.routing_replay = true: {type(router).__name__} does not weigh experts by a softmax over all of them; "
        "write false."
    )
