"""Tiny mixtures of experts whose experts matter, and episodes that the embedded engine sampled with them."""

import io
import random
import shutil
from pathlib import Path

import msgspec
import numpy as np
import torch
from learner_world import verdict
from safetensors.torch import load_file, save_file

from openforge.blobs import ref_to
from openforge.engine.batching import Batch, Limits, Served
from openforge.engine.loading import load
from openforge.engine.request import Request
from openforge.engine.stopping import StopRule
from openforge.models import tiny
from openforge.protos import Sequence, Span, TrajectoryVerified, VersionSpan, pack_ids, pack_logprobs
from openforge.runs import RunConfig
from openforge.wire.generate import SamplingParams

_LUCK = random.Random(3)
PROMPT = [1, *(_LUCK.randrange(3, 259) for _ in range(15))]
EXPERTS = 32


def mixture(folder: Path, experts: int = EXPERTS) -> Path:
    """One whose answers change where its tokens go through other experts."""
    made = tiny(folder, hidden=32, heads=2, kv_heads=1, experts=experts)
    tensors = load_file(made / "model.safetensors")
    grown = {name: tensor * (12.0 if ".experts." in name else 1.0) for name, tensor in tensors.items()}
    save_file(grown, made / "model.safetensors", metadata={"format": "pt"})
    return made


def sampled(folder: Path, prompts: list[list[int]], length: int = 12) -> list[Request]:
    """Answers of so many tokens, all at once, in float32."""
    with torch.inference_mode():
        batch = Batch(Served(load(folder, "float32").model, "0"), Limits(routed_experts=True))
        none: frozenset[int] = frozenset()
        rule = StopRule(end_token_ids=none, stop_token_ids=none, stop=(), longest=length, decode=lambda ids: "")
        requests = [
            Request(str(seed), prompt, SamplingParams(max_tokens=length, seed=seed), rule)
            for seed, prompt in enumerate(prompts)
        ]
        for request in requests:
            batch.add(request)
        while batch.running or batch.waiting:
            batch.step()
    return requests


def npy(rows: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, rows, allow_pickle=False)
    return file.getvalue()


def episodes(
    config: RunConfig, folder: Path, members: int = 4, groups: int = 1
) -> tuple[list[TrajectoryVerified], dict[str, bytes]]:
    """Groups, all of one prompt, and the files that tell of their experts, by digest."""
    files: dict[str, bytes] = {}
    found = []
    for number, request in enumerate(sampled(folder, [PROMPT] * (members * groups))):
        ordinal, member = divmod(number, members)
        rows = request.routed.first()
        assert rows is not None
        file = npy(rows)
        files[ref_to(file).digest] = file
        start, length = len(request.prompt), len(request.sampled)
        sequence = Sequence(
            ids=pack_ids(request.tokens),
            loss=(Span(start, length),),
            logprobs=pack_logprobs(request.logprobs),
            versions=(VersionSpan(start, length, 0),),
            turns=(0,),
            routed_experts=(ref_to(file),),
            routed_at=(Span(0, len(rows)),),
        )
        like = verdict(config, ordinal, member, 0, reward=float(member % 2))
        found.append(msgspec.structs.replace(like, sequences=(sequence,), sampled_tokens=length, prompt_tokens=start))
    return found, files


def recorded(path: Path, members: list[TrajectoryVerified], files: dict[str, bytes]) -> Path:
    path.write_bytes(msgspec.msgpack.encode((members, files)))
    return path


def turned(folder: Path, out: Path, files: dict[str, bytes]) -> Path:
    """The same model but for its routers: they prefer, for about half of all tokens, experts that none went through."""
    shutil.copytree(folder, out)
    drawn = torch.Generator().manual_seed(1)
    tensors = load_file(out / "model.safetensors")
    for name in sorted(name for name in tensors if name.endswith(".mlp.gate.weight")):
        for expert in unchosen(files, int(name.split(".")[2])):
            tensors[name][expert] = 30.0 * torch.randn(tensors[name].shape[1], generator=drawn)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def unchosen(files: dict[str, bytes], layer: int) -> list[int]:
    """Experts that no token went through."""
    chosen = {int(one) for file in files.values() for one in np.load(io.BytesIO(file))[:, layer].flatten()}
    return sorted(set(range(EXPERTS)) - chosen)
