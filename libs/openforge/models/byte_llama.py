"""A tiny random model of the Llama architecture, or a mixture of experts: for tests, conformance and smoke runs.

Promises: the same arguments give the same weights; every byte is one token; at most 5 million parameters.
"""

from pathlib import Path

from openforge.models.folder import made_at_once

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTES = 256 + len(SPECIAL_TOKENS)
MAX_PARAMETERS = 5_000_000


def tiny(
    path: str | Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 2048,
    vocabulary: int = BYTES,
    experts: int = 0,
) -> Path:
    """Write the checkpoint folder `path`, or keep the one that is there. The tokenizer has no ids from BYTES on.

    With `experts` it is a mixture of so many, of which each token goes through two: a Qwen3-MoE. Raises `ValueError`
    where no model has such sizes.
    """
    _expect_sizes(layers=layers, hidden=hidden, heads=heads, context=context, experts=experts)
    target = Path(path)
    if target.joinpath("config.json").exists():
        return target
    with made_at_once(target, name="tiny", source=f"random, seed {seed}", license="Apache-2.0") as draft:
        _write_tokenizer(draft, context)
        _write_weights(
            draft,
            seed=seed,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            context=context,
            vocabulary=vocabulary,
            experts=experts,
        )
    return target


def _expect_sizes(*, layers: int, hidden: int, heads: int, context: int, experts: int) -> None:
    for name, value, most in (("layers", layers, 64), ("hidden", hidden, 1024), ("context", context, 1 << 20)):
        if not 1 <= value <= most:
            raise ValueError(f"{name} = {value} is no size of a tiny model: write a number from 1 to {most}")
    if hidden % (2 * heads):
        raise ValueError(f"hidden = {hidden} does not split into {heads} heads: write a multiple of {2 * heads}")
    if experts not in (0, *range(2, 257)):
        raise ValueError(f"experts = {experts}: write 0 for none, or 2 to 256, since each token goes through two")


def tiny_moe(path: str | Path) -> Path:
    """Eight experts."""
    return tiny(path, experts=8)


def _write_tokenizer(folder: Path, context: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    end_of_text, start, end = SPECIAL_TOKENS
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=start,
        eos_token=end,
        pad_token=end,
        unk_token=end_of_text,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def _write_weights(
    folder: Path,
    *,
    seed: int,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    context: int,
    vocabulary: int,
    experts: int,
) -> None:
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    mixed = {
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden,
        "norm_topk_prob": True,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if experts:
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape | mixed))
        else:
            model = LlamaForCausalLM(LlamaConfig(**shape))
    parameters = sum(tensor.numel() for tensor in model.parameters())
    if parameters > MAX_PARAMETERS:
        raise ValueError(f"a tiny model of {parameters} parameters: lower layers or hidden, at most {MAX_PARAMETERS}")
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
