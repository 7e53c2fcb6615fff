"""The models that a machine can make, and how a run file's name for one becomes a folder."""

import json
import os
import time
from pathlib import Path

import pytest

from openforge.models import UnknownModel, get, resolve, tiny
from openforge.models.folder import chat_template, sha256_of

TOOLS = [{"type": "function", "function": {"name": "run", "description": "Run it.", "parameters": {"type": "object"}}}]


@pytest.fixture(autouse=True)
def own_models_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENFORGE_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


def _tokenizer(folder: Path):  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_the_tiny_model_is_small_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    first, again, other = tiny(tmp_path / "a"), tiny(tmp_path / "b"), tiny(tmp_path / "c", seed=1)
    assert (first / "model.safetensors").stat().st_size < 5_000_000 * 4
    assert sha256_of(first / "model.safetensors") == sha256_of(again / "model.safetensors")
    assert sha256_of(first / "model.safetensors") != sha256_of(other / "model.safetensors")


def test_a_tiny_model_above_five_million_parameters_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at most 5000000"):
        tiny(tmp_path / "big", hidden=1024, layers=4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"layers": 0}, "layers = 0 is no size of a tiny model: write a number from 1"),
        ({"hidden": -8}, "hidden = -8 is no size"),
        ({"context": 0}, "context = 0 is no size"),
        ({"hidden": 1_000_000}, "hidden = 1000000 is no size"),
        ({"hidden": 12}, "hidden = 12 does not split into 4 heads: write a multiple of 8"),
        ({"experts": 1}, "experts = 1: write 0 for none, or 2 to 256"),
        ({"experts": -2}, "experts = -2: write 0 for none, or 2 to 256"),
    ],
)
def test_a_tiny_model_of_a_size_that_no_model_has_is_refused(tmp_path: Path, sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tiny(tmp_path / "none", **sizes)
    assert list(tmp_path.iterdir()) == []


def test_every_byte_is_one_token_of_the_tiny_tokenizer(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tiny(tmp_path / "tiny"))
    text = "a  1\n\tö漢🙂" + "".join(map(chr, range(1, 128)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]


def test_the_record_names_the_sha256_of_every_file(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "tiny")
    record = json.loads((folder / "openforge.json").read_text())
    assert record["files"] == {file.name: sha256_of(file) for file in folder.iterdir() if file.name != "openforge.json"}


def test_the_template_renders_tools_calls_and_null_content(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tiny(tmp_path / "tiny"))
    assert tokenizer.chat_template == chat_template()
    call = {"type": "function", "function": {"name": "run", "arguments": '{"cmd": "ls"}'}}
    parsed = {"type": "function", "function": {"name": "run", "arguments": {"cmd": "ls"}}}
    turns = [
        {"role": "user", "content": "List."},
        {"role": "assistant", "content": None, "tool_calls": [call, parsed]},
        {"role": "tool", "content": "a.txt"},
    ]
    text = tokenizer.apply_chat_template(turns, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    one_call = '<tool_call>\n{"name": "run", "arguments": {"cmd": "ls"}}\n</tool_call>'
    assert text.startswith("<|im_start|>system\nYou are a helpful assistant.\n\n# Tools\n")
    assert text.count(json.dumps(TOOLS[0])) == 1
    assert text.endswith(
        f"<|im_start|>user\nList.<|im_end|>\n<|im_start|>assistant\n{one_call}\n{one_call}<|im_end|>\n"
        "<|im_start|>tool\na.txt<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_template_uses_the_callers_system_turn_once(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tiny(tmp_path / "tiny"))
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_builtin_name_becomes_a_folder_once_it_was_made(own_models_home: Path) -> None:
    with pytest.raises(UnknownModel, match="openforge model get tiny"):
        resolve("builtin:tiny")
    assert get("tiny") == own_models_home / "tiny"
    assert resolve("builtin:tiny") == own_models_home / "tiny"


def test_a_path_is_taken_as_it_is_and_an_unknown_model_names_the_way_out(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "mine")
    assert resolve(str(folder)) == folder
    with pytest.raises(UnknownModel, match="builtin:smollm2-135m, builtin:tiny"):
        resolve(str(tmp_path / "absent"))
    with pytest.raises(UnknownModel, match="smollm2-135m, tiny"):
        resolve("builtin:gpt-7")


@pytest.mark.heavy
def test_smollm2_is_a_normal_checkpoint_with_digits_split_one_by_one() -> None:
    from transformers import AutoConfig

    folder = get("smollm2-135m")
    config = AutoConfig.from_pretrained(folder)
    tokenizer = _tokenizer(folder)
    assert (config.rms_norm_eps, config.tie_word_embeddings, config.vocab_size) == (1e-5, True, 49152)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("  12\n\n1.")) == ["ĠĠ", "1", "2", "ĊĊ", "1", "."]


def test_what_a_crash_left_is_removed_when_the_model_is_made_again(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".tiny-old", tmp_path / ".tiny-fresh"
    for draft in (old, fresh):
        draft.mkdir()
    os.utime(old, (time.time() - 7200,) * 2)
    tiny(tmp_path / "tiny")
    assert {entry.name for entry in tmp_path.iterdir()} == {"tiny", ".tiny-fresh"}
