"""`openforge checkpoint`: what is listed and exported, and what is said where that cannot be."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import Result
from learner_world import run_config, tiny_model, verdict
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from openforge.cli.main import app
from openforge.learner.backends.storage import save_whole
from openforge.learner.backends.torch_fsdp import TorchBackend
from openforge.learner.checkpoints import MEMORY, Checkpoints, Memory
from openforge.learner.step import batch_of, step_of
from openforge.runs import RunConfig, canonical

LORA = {"lora": {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}}


def openforge(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENFORGE_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def learner_of(tmp_path: Path, **learner: Any) -> TorchBackend:
    return TorchBackend(run_config(tiny_model(tmp_path), "r", learner=learner))


def train(backend: TorchBackend, base: int) -> None:
    trajectories = {one.episode: one for one in (verdict(backend.config, base, member, 0) for member in range(4))}
    batch = batch_of(base, [f"g{base:06d}"], trajectories, 0)
    backend.train(step_of(batch, backend.config.algorithm, backend.vocabulary).sequences, base)


def save(runs: Path, backend: TorchBackend, version: int, reward: float, config: RunConfig | None = None) -> Path:
    memory = Memory(
        version=version,
        config_digest="d",
        batcher=b"fold",
        cursors={},
        config=canonical(config or backend.config)[0],
        rewards=(reward,),
    )
    return Checkpoints(runs / "r/checkpoints", keep=9).save(memory, backend.save)


def weights(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.export().items()}


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def holds(model: Any, expected: dict[str, torch.Tensor]) -> bool:
    found = dict(model.named_parameters())
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits  # type: ignore[no-any-return]


def test_last_best_and_numbered_checkpoints_are_plain_folders_with_their_own_weights(
    runs: Path, tmp_path: Path
) -> None:
    backend, expected = learner_of(tmp_path), {}
    for version, reward in ((1, 0.2), (2, 0.9), (3, 0.4)):
        train(backend, version - 1)
        save(runs, backend, version, reward)
        expected[version] = weights(backend)
    assert not torch.equal(*(expected[version]["model.norm.weight"] for version in (2, 3)))
    for asked, version in (("last", 3), ("best", 2), ("1", 1)):
        done = openforge("export", "r", "--version", asked, tmp_path / f"plain-{asked}")
        assert done.exit_code == 0, done.output
        assert f"version {version} of run r" in done.output
        assert holds(loaded(tmp_path / f"plain-{asked}"), expected[version])
    assert (tmp_path / "plain-last/tokenizer.json").exists()
    assert not (tmp_path / "plain-last/manifest.json").exists(), "nothing of ours is in a plain folder"


def test_the_list_says_which_is_last_and_which_is_best(runs: Path, tmp_path: Path) -> None:
    backend = learner_of(tmp_path)
    for version, reward in ((5, 0.75), (10, 0.5)):
        save(runs, backend, version, reward)
    listed = msgspec.json.decode(openforge("list", "r", "--json").output)["checkpoints"]
    assert [(one["version"], one["reward"], one["last"], one["best"]) for one in listed] == [
        (10, 0.5, True, False),
        (5, 0.75, False, True),
    ]
    assert all(one["bytes"] > 1000 for one in listed)
    printed = openforge("list", "r").output.splitlines()
    assert [line.split()[0] for line in printed] == ["version", "10", "5"]
    assert printed[1].endswith("last")
    assert printed[2].endswith("best")


def test_adapters_leave_merged_or_alone_and_say_the_same(runs: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    backend = learner_of(tmp_path, **LORA)
    train(backend, 0)
    save(runs, backend, 1, 0.5)
    assert openforge("export", "r", tmp_path / "merged").exit_code == 0
    assert openforge("export", "r", "--adapter", tmp_path / "adapter").exit_code == 0
    merged, first = loaded(tmp_path / "merged"), loaded(tmp_path / "model")
    assert holds(merged, weights(backend))
    untrained = logits(first)
    adapted = PeftModel.from_pretrained(first, tmp_path / "adapter")
    assert torch.allclose(logits(adapted), logits(merged), atol=1e-5)
    assert not torch.allclose(logits(adapted), untrained, atol=1e-5)


def test_config_and_tokenizer_of_a_built_in_model_are_found(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENFORGE_MODELS", str(tmp_path / "models"))
    backend = learner_of(tmp_path)
    config = run_config(Path("builtin:tiny"), "r")
    save(runs, backend, 1, 0.5, config)
    assert_said(openforge("export", "r", tmp_path / "plain"), "run `openforge model get tiny` first")
    (tmp_path / "models").mkdir()
    (tmp_path / "models/tiny").symlink_to(tmp_path / "model")
    assert openforge("export", "r", tmp_path / "plain").exit_code == 0
    assert holds(loaded(tmp_path / "plain"), weights(backend))


def test_bfloat16_is_written_where_it_is_asked_for(runs: Path, tmp_path: Path) -> None:
    backend = learner_of(tmp_path)
    save(runs, backend, 1, 0.5)
    assert openforge("export", "r", "--dtype", "bfloat16", tmp_path / "half").exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_what_cannot_be_exported_is_said_in_one_sentence(runs: Path, tmp_path: Path) -> None:
    backend, out = learner_of(tmp_path), tmp_path / "out"
    assert_said(openforge("list", "r"), f"run 'r' has no folder {runs / 'r'}")
    (runs / "r").mkdir(parents=True)
    assert_said(openforge("export", "r", out), "run 'r' has no whole checkpoint")
    for version in (5, 10):
        folder = save(runs, backend, version, 0.5)
    assert_said(
        openforge("export", "r", "--version", "7", out), "no checkpoint of --version 7: choose best, last or 10, 5"
    )
    assert_said(
        openforge("export", "r", "--version", "newest", out), "--version newest is none of best, last or a number"
    )
    assert_said(openforge("export", "r", "--adapter", out), "learner.lora.rank = 0")
    assert_said(openforge("export", "r", tmp_path), f"OUT {tmp_path} is already there")
    assert_said(openforge("list", "a/b"), "a/b")
    damage(folder)
    assert_said(openforge("export", "r", out), "c000010 cannot be read")
    (tmp_path / "model/config.json").unlink()
    assert_said(openforge("export", "r", out), str(tmp_path / "model"))
    assert not out.exists()


def damage(folder: Path) -> None:
    """Other bytes, as many as before."""
    metadata = folder / "state/.metadata"
    metadata.write_bytes(bytes(metadata.stat().st_size))


def assert_said(done: Result, sentence: str) -> None:
    assert done.exit_code in (1, 2), done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert sentence in done.output


def test_of_an_engine_with_files_of_its_own_the_weights_beside_them_are_exported(runs: Path, tmp_path: Path) -> None:
    backend = learner_of(tmp_path)
    train(backend, 0)

    def write(folder: Path) -> None:
        (folder / "engine.bin").write_bytes(b"what only it can read")
        save_whole(folder, {name: tensor.to(torch.bfloat16) for name, tensor in backend.export().items()})

    options = {"engine": "megatron"}
    config = run_config(
        tmp_path / "model", "r", learner={"backend": "verl", "autocast": "bfloat16", "backend_options": options}
    )
    memory = Memory(version=1, config_digest="d", batcher=b"fold", cursors={}, config=canonical(config)[0])
    Checkpoints(runs / "r/checkpoints").save(memory, write)
    assert openforge("export", "r", tmp_path / "plain").exit_code == 0
    assert holds(loaded(tmp_path / "plain"), {n: t.to(torch.bfloat16).float() for n, t in weights(backend).items()})


def test_a_checkpoint_without_rewards_is_not_the_best(runs: Path, tmp_path: Path) -> None:
    folder = save(runs, learner_of(tmp_path), 1, 0.5)
    said = msgspec.json.decode((folder / MEMORY).read_bytes())
    del said["rewards"]
    (folder / MEMORY).write_bytes(msgspec.json.encode(said))
    assert_said(openforge("export", "r", "--version", "best", tmp_path / "out"), "has a reward noted")
    assert openforge("export", "r", tmp_path / "out").exit_code == 0
