"""Reading a checkpoint folder: its shape from `config.json`, its tensors from safetensors.

Promises: what is returned is complete, each tensor of the shape that the config implies; anything that this
engine cannot compute exactly is refused by name.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from openforge.weights import WEIGHTS, BadWeights

_ARCHITECTURES = {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"}
_WAY_OUT = 'serve it with engine.kind = "vllm"'


class UnsupportedModel(ValueError):
    """The embedded engine cannot compute this model."""


class LlamaShape(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a Llama-architecture model. `context` is its longest sequence in tokens.

    In `sparse_layers` each token goes through `experts_per_token` of so many `experts`.
    """

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    rms_eps: float
    rope_theta: float
    context: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    stop_token_ids: tuple[int, ...]
    experts: int = 0
    experts_per_token: int = 0
    experts_intermediate: int = 0
    experts_normalised: bool = False
    sparse_layers: frozenset[int] = frozenset()


def read_shape(folder: Path) -> LlamaShape:
    """Raises `UnsupportedModel` naming what the embedded engine does not do."""
    config = _read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise UnsupportedModel(f"model_type {kind!r} of {folder}: the embedded engine computes {known}; {_WAY_OUT}.")
    _refuse_what_is_not_computed(folder, config)
    heads = config["num_attention_heads"]
    bias = bool(config.get("attention_bias", False))
    return LlamaShape(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        rms_eps=config["rms_norm_eps"],
        rope_theta=_rope(config).get("rope_theta") or config.get("rope_theta") or 10_000.0,
        context=config["max_position_embeddings"],
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias or kind == "qwen2",
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        stop_token_ids=_stop_token_ids(folder, config),
        **(_experts(config) if kind == "qwen3_moe" else {}),
    )


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    """The files of transformers 4 and of transformers 5 call the number of experts by other names."""
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    dense, every = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step", 1)
    sparse = {index for index in range(config["num_hidden_layers"]) if (index + 1) % every == 0} - dense
    return {
        "experts": experts,
        "experts_per_token": config["num_experts_per_tok"],
        "experts_intermediate": config["moe_intermediate_size"],
        "experts_normalised": bool(config.get("norm_topk_prob", False)),
        "sparse_layers": frozenset(sparse if experts else ()),
    }


def read_tensors(folder: Path, shape: LlamaShape) -> dict[str, torch.Tensor]:
    """All tensors of the model, by checkpoint name; raises `BadWeights`."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadWeights(f"weights {folder}: there is no {WEIGHTS}.")
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise BadWeights(f"weights {path}: cannot be read ({error}).") from error
    if shape.tied:
        tensors.pop("lm_head.weight", None)
    _check_shapes(folder, tensors, expected_tensors(shape))
    return tensors


def expected_tensors(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Checkpoint names and shapes that a model of this shape has."""
    hidden, head = shape.hidden, shape.head_size
    wide, narrow = shape.heads * head, shape.kv_heads * head
    expected: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, hidden)}
    expected["model.norm.weight"] = (hidden,)
    if not shape.tied:
        expected["lm_head.weight"] = (shape.vocabulary, hidden)
    for layer in range(shape.layers):
        attention = f"model.layers.{layer}.self_attn"
        for name, rows, columns, bias in (
            (f"{attention}.q_proj", wide, hidden, shape.qkv_bias),
            (f"{attention}.k_proj", narrow, hidden, shape.qkv_bias),
            (f"{attention}.v_proj", narrow, hidden, shape.qkv_bias),
            (f"{attention}.o_proj", hidden, wide, shape.output_bias),
            *_expected_mlp(shape, layer),
        ):
            expected[f"{name}.weight"] = (rows, columns)
            if bias:
                expected[f"{name}.bias"] = (rows,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            expected[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
        if shape.qk_norm:
            expected[f"{attention}.q_norm.weight"] = (head,)
            expected[f"{attention}.k_norm.weight"] = (head,)
    return expected


def _expected_mlp(shape: LlamaShape, layer: int) -> Iterator[tuple[str, int, int, bool]]:
    """Names, rows and columns of linear maps, and whether they have a bias."""
    hidden, mlp = shape.hidden, f"model.layers.{layer}.mlp"
    networks, inner = [mlp], shape.intermediate
    if layer in shape.sparse_layers:
        yield f"{mlp}.gate", shape.experts, hidden, False
        networks, inner = [f"{mlp}.experts.{index}" for index in range(shape.experts)], shape.experts_intermediate
    for network in networks:
        yield f"{network}.gate_proj", inner, hidden, shape.mlp_bias
        yield f"{network}.up_proj", inner, hidden, shape.mlp_bias
        yield f"{network}.down_proj", hidden, inner, shape.mlp_bias


def _check_shapes(folder: Path, found: dict[str, torch.Tensor], expected: dict[str, tuple[int, ...]]) -> None:
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys())
    other = sorted(name for name in expected.keys() & found.keys() if tuple(found[name].shape) != expected[name])
    if missing or extra or other:
        raise BadWeights(
            f"weights {folder}: the tensors are not those of its config.json: missing {missing[:3]}, "
            f"unexpected {extra[:3]}, of other shape {other[:3]}."
        )


def _refuse_what_is_not_computed(folder: Path, config: dict[str, Any]) -> None:
    if (rope := _rope(config).get("rope_type") or _rope(config).get("type") or "default") != "default":
        raise UnsupportedModel(f"rope scaling {rope!r} of {folder}: the embedded engine has none; {_WAY_OUT}.")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModel(f"hidden_act {activation!r} of {folder}: the embedded engine has silu; {_WAY_OUT}.")
    window = config.get("sliding_window")
    windowed = config.get("use_sliding_window", config["model_type"] == "mistral")
    if windowed and window and window < config["max_position_embeddings"]:
        raise UnsupportedModel(f"sliding_window {window} of {folder}: the embedded engine has none; {_WAY_OUT}.")


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _stop_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    stated = _read_json(path).get("eos_token_id") if path.exists() else None
    stop = config.get("eos_token_id") if stated is None else stated
    if stop is None:
        return ()
    return tuple(stop) if isinstance(stop, list) else (stop,)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadWeights(f"{path} cannot be read ({error}).") from error
    return data
