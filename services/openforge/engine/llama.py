"""The Llama forward pass over a packed row of tokens that belong to many sequences, with experts or without.

Promises: the logits of a token depend on its own sequence alone; in float32 they are those of the reference
implementation up to rounding. Who may see whom is decided by the `Attention` that the caller passes.
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec
import torch
from torch.nn.functional import rms_norm

from openforge.engine.checkpoint import LlamaShape
from openforge.engine.experts import Mixture, Network
from openforge.engine.linear import Linear, compute_dtype

_INVARIANT_ROWS = 16  # of 8 to 64 rows at a time the cheapest both for prompts and for a few answers


class Attention(Protocol):
    """The second half of a layer's memory: keeps keys and values, and answers queries."""

    def __call__(self, layer: int, q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor) -> torch.Tensor:
        """What each token reads, of shape (T, H * d)."""
        ...


class _Layer(msgspec.Struct, frozen=True):
    norm_attention: torch.Tensor
    norm_mlp: torch.Tensor
    qkv: Linear
    out: Linear
    mlp: Network | Mixture
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


class Llama:
    """A model ready to compute. Holds its own copy of the weights; never changes."""

    def __init__(
        self,
        shape: LlamaShape,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """`dtype` is that of the weights; the computation may be wider (`self.dtype`).

        `batch_invariant`: what is computed of a token has the same bits whatever tokens are computed beside it.
        """
        self.shape = shape
        self.dtype = compute_dtype(dtype)
        self._tensors = {name: tensor.to(dtype).to(self.dtype) for name, tensor in tensors.items()}
        embedding = self._tensors["model.embed_tokens.weight"]
        self._embedding = embedding.clone()  # the tensors of a file change if somebody writes to it
        self._norm = self._tensors["model.norm.weight"].clone()
        self._block = _INVARIANT_ROWS if batch_invariant else 0
        self._head = Linear(embedding if shape.tied else self._tensors["lm_head.weight"], block=self._block)
        self._layers = [self._layer(index) for index in range(shape.layers)]
        self._cos, self._sin = self._rotations()
        del self._tensors

    @property
    def kv_bytes_per_token(self) -> int:
        shape = self.shape
        return 2 * shape.layers * shape.kv_heads * shape.head_size * int(self.dtype.itemsize)

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Attention,
        chosen: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The last hidden state of each token, before the final norm. `chosen` gets each layer's experts (T, k)."""
        shape, T = self.shape, len(tokens_T)
        queries = shape.heads * shape.head_size
        rotated = queries + shape.kv_heads * shape.head_size
        cos, sin = self._cos[positions_T, None], self._sin[positions_T, None]
        x = self._embedding[tokens_T]
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(rms_norm(x, (shape.hidden,), layer.norm_attention, shape.rms_eps))
            qk = qkv[:, :rotated].view(T, -1, shape.head_size)
            if layer.q_norm is not None and layer.k_norm is not None:
                qk = self._norm_heads(qk, layer.q_norm, layer.k_norm)
            qk = _rotate(qk, cos, sin)
            v = qkv[:, rotated:].view(T, shape.kv_heads, shape.head_size)
            x = layer.out.plus(attend(index, qk[:, : shape.heads], qk[:, shape.heads :], v), x)
            normed = rms_norm(x, (shape.hidden,), layer.norm_mlp, shape.rms_eps)
            if isinstance(layer.mlp, Network):
                x, experts_Tk = layer.mlp.plus(normed, x), None
            else:
                x, experts_Tk = layer.mlp.plus(normed, x)
            if chosen is not None:
                chosen.append(torch.zeros(T, shape.experts_per_token).long() if experts_Tk is None else experts_Tk)
        return x

    def logits(self, hidden_N: torch.Tensor) -> torch.Tensor:
        """Float32 logits (N, V) from last hidden states."""
        normed = rms_norm(hidden_N, (self.shape.hidden,), self._norm, self.shape.rms_eps)
        return self._head(normed).float()

    def _layer(self, index: int) -> _Layer:
        prefix = f"model.layers.{index}"
        take = self._tensors
        attention = [f"{prefix}.self_attn.{part}_proj" for part in "qkv"]
        return _Layer(
            norm_attention=take[f"{prefix}.input_layernorm.weight"].clone(),
            norm_mlp=take[f"{prefix}.post_attention_layernorm.weight"].clone(),
            qkv=self._fused(attention),
            out=self._fused([f"{prefix}.self_attn.o_proj"]),
            mlp=self._mixture(f"{prefix}.mlp") if index in self.shape.sparse_layers else self._network(f"{prefix}.mlp"),
            q_norm=take.get(f"{prefix}.self_attn.q_norm.weight"),
            k_norm=take.get(f"{prefix}.self_attn.k_norm.weight"),
        )

    def _mixture(self, prefix: str) -> Mixture:
        shape = self.shape
        return Mixture(
            router=self._fused([f"{prefix}.gate"]),
            experts=[self._network(f"{prefix}.experts.{index}") for index in range(shape.experts)],
            per_token=shape.experts_per_token,
            normalised=shape.experts_normalised,
        )

    def _network(self, prefix: str) -> Network:
        return Network(
            gate_up=self._fused([f"{prefix}.gate_proj", f"{prefix}.up_proj"]),
            down=self._fused([f"{prefix}.down_proj"]),
        )

    def _fused(self, names: list[str]) -> Linear:
        take = self._tensors
        weight = torch.cat([take[f"{name}.weight"] for name in names])
        biased = f"{names[0]}.bias" in take
        bias = torch.cat([take[f"{name}.bias"] for name in names]) if biased else None
        return Linear(weight, bias, block=self._block)

    def _norm_heads(self, qk: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor) -> torch.Tensor:
        size, eps, heads = (self.shape.head_size,), self.shape.rms_eps, self.shape.heads
        return torch.cat(
            (rms_norm(qk[:, :heads], size, q_norm, eps), rms_norm(qk[:, heads:], size, k_norm, eps)), dim=1
        )

    def _rotations(self) -> tuple[torch.Tensor, torch.Tensor]:
        half = torch.arange(0, self.shape.head_size, 2, dtype=torch.int64).float() / self.shape.head_size
        angles = torch.arange(self.shape.context).float()[:, None] * (1.0 / self.shape.rope_theta**half)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, halves paired."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
