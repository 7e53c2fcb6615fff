"""Weights folders: what is written can be checked, and any other bytes are found."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from openforge.models import tiny
from openforge.weights import BadWeights, Probe, Written, check, keep_newest, read_manifest, write_weights
from openforge.weights.manifest import digest_of

PROBE = Probe(prompt_ids=(1, 5), token_ids=(7,), logprobs=(-5.5,))
TENSORS = {"model.embed_tokens.weight": torch.arange(12.0).reshape(3, 4), "model.norm.weight": torch.ones(4)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "tiny")


def _write(root: Path, model: Path, version: int = 3, incarnation: int = 0) -> Written:
    return write_weights(
        root, TENSORS, config_dir=model, version=version, incarnation=incarnation, probe=PROBE, dtype="float32"
    )


def test_what_was_written_passes_the_check_and_reads_back(tmp_path: Path, model: Path) -> None:
    written = _write(tmp_path, model)
    check(written.path, written.digest)
    manifest = read_manifest(written.path)
    assert written.path.name == "v000003-0"
    assert (manifest.version, manifest.incarnation, manifest.probe) == (3, 0, PROBE)
    assert manifest.tensors["model.embed_tokens.weight"].shape == (3, 4)
    assert written.bytes == sum(file.stat().st_size for file in written.path.iterdir())
    assert {"tokenizer.json", "chat_template.jinja", "config.json"} <= manifest.files.keys()


def test_the_dtype_is_cast_and_stated_in_the_config(tmp_path: Path, model: Path) -> None:
    written = write_weights(tmp_path, TENSORS, config_dir=model, version=0, incarnation=0, probe=None, dtype="bfloat16")
    assert json.loads((written.path / "config.json").read_text())["dtype"] == "bfloat16"
    assert read_manifest(written.path).tensors["model.norm.weight"].dtype == "BF16"


def test_a_tied_head_is_not_written_twice(tmp_path: Path, model: Path) -> None:
    tied = TENSORS | {"lm_head.weight": TENSORS["model.embed_tokens.weight"]}
    written = write_weights(tmp_path, tied, config_dir=model, version=0, incarnation=0, probe=None, dtype="float32")
    assert "lm_head.weight" not in read_manifest(written.path).tensors


def test_a_changed_byte_a_cut_file_and_another_digest_are_found(tmp_path: Path, model: Path) -> None:
    written = _write(tmp_path, model)
    with pytest.raises(BadWeights, match="digest"):
        check(written.path, "0" * 64)
    weights = written.path / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + b"\x01")
    with pytest.raises(BadWeights, match="blake3"):
        check(written.path, written.digest)
    weights.write_bytes(good[:-1])
    with pytest.raises(BadWeights, match="bytes"):
        check(written.path, written.digest)
    weights.unlink()
    with pytest.raises(BadWeights, match="safetensors"):
        check(written.path, written.digest)


def test_other_tensors_than_the_manifest_states_are_found(tmp_path: Path, model: Path) -> None:
    from safetensors.torch import save_file

    written = _write(tmp_path, model)
    save_file({"model.norm.weight": torch.ones(5)}, written.path / "model.safetensors")
    with pytest.raises(BadWeights, match=r"missing \['model.embed_tokens.weight'\].*\['model.norm.weight'\]"):
        check(written.path, written.digest)


def test_a_folder_without_manifest_is_bad_weights(tmp_path: Path) -> None:
    with pytest.raises(BadWeights, match=r"manifest\.json"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(BadWeights, match="decoded"):
        read_manifest(tmp_path)


def test_writing_a_version_again_replaces_what_a_crash_left(tmp_path: Path, model: Path) -> None:
    first = _write(tmp_path, model)
    (first.path / "model.safetensors").write_bytes(b"half")
    again = _write(tmp_path, model)
    check(again.path, again.digest)
    assert [entry.name for entry in tmp_path.iterdir()] == ["v000003-0"]


def test_only_the_newest_and_those_in_use_stay(tmp_path: Path, model: Path) -> None:
    folders = [_write(tmp_path, model, version, incarnation).path for version, incarnation in ((0, 0), (1, 0), (2, 0))]
    newest = _write(tmp_path, model, 2, 1).path
    fresh, stale = tmp_path / ".v000003-0-abc", tmp_path / ".v000003-0-old"
    fresh.mkdir()
    stale.mkdir()
    os.utime(stale, (time.time() - 7200,) * 2)
    keep_newest(tmp_path, 1, in_use=[folders[0]])
    assert {entry.name for entry in tmp_path.iterdir()} == {folders[0].name, newest.name, fresh.name}


def test_the_manifest_is_read_without_a_tensor_library() -> None:
    heavy = "{'torch', 'transformers'}.isdisjoint(sys.modules)"
    script = f"import sys, openforge.weights, openforge.models; sys.exit(not {heavy})"
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": "protos:libs"}, check=False)
    assert done.returncode == 0


def test_a_folder_that_states_sha256_is_checked_by_it(tmp_path: Path, model: Path) -> None:
    written = _write(tmp_path, model)
    manifest = json.loads((written.path / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        del entry["blake3"]
        entry["sha256"] = hashlib.sha256((written.path / name).read_bytes()).hexdigest()
    data = json.dumps(manifest).encode()
    (written.path / "manifest.json").write_bytes(data)
    check(written.path, digest_of(data))
    weights = written.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(BadWeights, match="sha256"):
        check(written.path, digest_of(data))
