"""The forward pass against the reference implementation, for each architecture that the engine says it computes."""

import json
from pathlib import Path

import pytest
import torch
from reference_model import largest_difference, reference_logprobs

from openforge.engine.batching import score
from openforge.engine.checkpoint import UnsupportedModel, read_shape, read_tensors
from openforge.engine.llama import Llama
from openforge.models import tiny
from openforge.weights import BadWeights

PROMPT = [1, 77, 12, 200, 5, 5, 31]
ANSWER = [9, 250, 14, 2, 2, 100]
_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 24}


def _llama(folder: Path) -> Llama:
    shape = read_shape(folder)
    return Llama(shape, read_tensors(folder, shape), torch.float32)


def _saved(folder: Path, model_class: str, config_class: str, **changes: object) -> Path:
    import transformers

    sizes = {
        "vocab_size": 259,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    config = getattr(transformers, config_class)(**(sizes | changes))
    torch.manual_seed(5)
    model = getattr(transformers, model_class)(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("model_class", "config_class", "changes"),
    [
        ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True}),
        ("LlamaForCausalLM", "LlamaConfig", {"attention_bias": True, "mlp_bias": True, "rope_theta": 500.0}),
        ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 4, "head_dim": 16}),
        ("Qwen2ForCausalLM", "Qwen2Config", {"tie_word_embeddings": True}),
        ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 24}),
        ("MistralForCausalLM", "MistralConfig", {"sliding_window": None}),
        ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [1]}),
        ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _EXPERTS | {"decoder_sparse_step": 2}),
    ],
)
def test_logprobs_are_those_of_the_reference(
    tmp_path: Path, model_class: str, config_class: str, changes: dict[str, object]
) -> None:
    folder = _saved(tmp_path / "model", model_class, config_class, **changes)
    with torch.inference_mode():
        found = score(_llama(folder), PROMPT, ANSWER)
    assert largest_difference(found, reference_logprobs(folder, PROMPT, ANSWER)) < 1e-4


def test_bfloat16_weights_are_rounded_whatever_the_processor_computes_in(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "tiny")
    shape = read_shape(folder)
    model = Llama(shape, read_tensors(folder, shape), torch.bfloat16)
    with torch.inference_mode():
        found = score(model, PROMPT, ANSWER)
    assert 0.0 < largest_difference(found, reference_logprobs(folder, PROMPT, ANSWER)) < 0.05


def test_what_cannot_be_computed_exactly_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "tiny")
    good = json.loads((folder / "config.json").read_text())
    for change, named in (
        ({"model_type": "mamba"}, "mamba"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding_window"),
    ):
        (folder / "config.json").write_text(json.dumps(good | change))
        with pytest.raises(UnsupportedModel, match=rf'{named}.*engine.kind = "vllm"'):
            read_shape(folder)


def test_tensors_that_do_not_fit_the_config_are_bad_weights(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64, "num_hidden_layers": 3}))
    with pytest.raises(BadWeights, match=r"missing .*layers.2.*of other shape .*mlp"):
        read_tensors(folder, read_shape(folder))
