"""A tiny random model of the Llama architecture with a real tokenizer and a long window: for conformance runs.

Promises: prompts have as many tokens as with a real small model; a prompt of 20,000 tokens takes seconds on a CPU;
at most 5 million parameters.
"""

import shutil
from pathlib import Path

from openforge.models.byte_llama import MAX_PARAMETERS
from openforge.models.folder import made_at_once

CONTEXT = 65536
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def tiny_long(path: str | Path) -> Path:
    """Write the checkpoint folder `path`, or keep the one that is there. The tokenizer is SmolLM2's."""
    from openforge.models.find import get

    target = Path(path)
    if target.joinpath("config.json").exists():
        return target
    tokenizer = get("smollm2-135m")
    source = "random weights, seed 0; the tokenizer of smollm2-135m"
    with made_at_once(target, name="tiny-long", source=source, license="Apache-2.0") as draft:
        for name in _TOKENIZER_FILES:
            if tokenizer.joinpath(name).exists():
                shutil.copyfile(tokenizer / name, draft / name)
        _write_weights(draft)
    return target


def _write_weights(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(with_added_tokens=True)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        **ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    assert sum(tensor.numel() for tensor in model.parameters()) <= MAX_PARAMETERS
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
