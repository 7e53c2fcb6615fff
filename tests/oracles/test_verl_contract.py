"""What the adapter calls, against what verl 0.9.1 has. Its Megatron engine cannot be imported without a GPU's packages:
its signatures are read from its source, and an engine with its conventions is asked for a step."""

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import verl
from learner_world import run_config, tiny_model, verdict

from openforge.learner.backends.contract import BackendRefused
from openforge.learner.backends.loading import as_stored
from openforge.learner.backends.options import VerlOptions
from openforge.learner.backends.storage import policy_parameters
from openforge.learner.backends.torch_fsdp import TorchBackend
from openforge.learner.backends.verl_platform import use_cpu
from openforge.learner.step import batch_of, step_of
from openforge.models import tiny
from openforge.runs import RunConfig

MEGATRON = Path(verl.__file__).parent / "workers/engine/megatron/transformer_impl.py"
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    """A process group of one, before verl's engines are imported."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    use_cpu()
    _register()
    yield
    dist.destroy_process_group()


def _register() -> None:
    """An engine that keeps Megatron's conventions: a loss for each micro-batch, which it scales, and bare floats."""
    from transformers import AutoModelForCausalLM
    from verl.workers.engine import BaseEngine, EngineRegistry
    from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

    class Recorded(BaseEngine):
        def __init__(
            self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
        ) -> None:
            self.model_config, self.engine_config, self.asked = model_config, engine_config, optimizer_config

        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if name.startswith("_") or not inspect.ismethod(found):
                return found

            def noted(*args: Any, **kwargs: Any) -> Any:
                CALLS.append((name, args, kwargs))
                return found(*args, **kwargs)

            return noted

        is_param_offload_enabled = is_optimizer_offload_enabled = False

        def initialize(self) -> None:
            self.module = AutoModelForCausalLM.from_pretrained(self.model_config.local_path, dtype=torch.float32)
            self.optimizer = torch.optim.AdamW(
                self.module.parameters(), self.asked.lr, self.asked.betas, weight_decay=self.asked.weight_decay
            )

        def train_mode(self, **_: Any) -> Any:
            return torch.enable_grad()

        def eval_mode(self, **_: Any) -> Any:
            return torch.no_grad()

        def optimizer_zero_grad(self) -> None:
            self.optimizer.zero_grad()

        def optimizer_step(self) -> float:
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.asked.clip_grad)
            self.optimizer.step()
            return norm.item()

        def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
            parts, indices = prepare_micro_batches(data=data, dp_group=None)
            assert len(parts) > 1, "the batch of this test fills several micro-batches"
            told = []
            for part in parts:
                output = {"log_probs": self._log_probs(part)}
                if loss_function is not None:
                    loss, _ = loss_function(model_output=output, data=part, dp_group=None)
                    (loss * len(parts) / len(parts)).backward()
                told.append(
                    {
                        "model_output": {name: value.detach() for name, value in output.items()},
                        "loss": 0.0,
                        "metrics": {},
                    }
                )
            return postprocess_batch_func(output_lst=told, indices=indices, data=data)

        def _log_probs(self, part: Any) -> torch.Tensor:
            rows = []
            for ids_T, temperature in zip(part["input_ids"].unbind(), part["temperature"], strict=True):
                logprobs_TV = (self.module(input_ids=ids_T[None]).logits[0] / temperature).log_softmax(-1)
                rows.append(logprobs_TV.gather(-1, ids_T.roll(-1)[:, None])[:, 0])
            return torch.nested.nested_tensor_from_jagged(torch.cat(rows), part["input_ids"].offsets())

        def get_per_tensor_param(self, **_: Any) -> Any:
            told = as_stored(self.model_config.local_path, dict(self.module.named_parameters()))
            return ((name, value.to(torch.bfloat16)) for name, value in told.items()), None

        def get_data_parallel_size(self) -> int:
            return 1

        def get_data_parallel_rank(self) -> int:
            return 0

        def is_mp_src_rank_with_outputs(self) -> bool:
            return True

        def save_checkpoint(self, local_path: str, **_: Any) -> None:
            torch.save(self.module.state_dict(), Path(local_path) / "model.pt")

        def load_checkpoint(self, local_path: str, **_: Any) -> None:
            self.module.load_state_dict(torch.load(Path(local_path) / "model.pt"))

    EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu")(Recorded)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    options = {"engine": "megatron", "tensor_parallel": 2, "recompute": True}
    learner = {"backend": "verl", "autocast": "bfloat16", "backend_options": options, "row_tokens": 48}
    return run_config(tiny_model(tmp_path), learner=learner)


def sequences(config: RunConfig, vocabulary: int) -> Any:
    trajectories = [verdict(config, ordinal, member, 0) for ordinal in (0, 1) for member in range(4)]
    groups = list(dict.fromkeys(one.group for one in trajectories))
    batch = batch_of(0, groups, {one.episode: one for one in trajectories}, 0)
    return step_of(batch, config.algorithm, vocabulary).sequences


def test_every_call_of_the_adapter_fits_verls_megatron_and_fsdp_engines(config: RunConfig, tmp_path: Path) -> None:
    from verl.workers.engine import FSDPEngineWithLMHead

    from openforge.learner.backends.verl import VerlBackend

    CALLS.clear()
    backend = VerlBackend(config)
    batch = sequences(config, backend.vocabulary)
    backend.train(batch, 0)
    backend.logprobs(batch)
    backend.export()
    (tmp_path / "state").mkdir()
    backend.save(tmp_path / "state")
    backend.load(tmp_path / "state")
    called = {name for name, _, _ in CALLS}
    assert {"initialize", "optimizer_step", "infer_batch", "save_checkpoint", "load_checkpoint"} <= called
    for name, args, kwargs in CALLS:
        megatron(name).bind(None, *args, **kwargs)
        inspect.signature(getattr(FSDPEngineWithLMHead, name)).bind(None, *args, **kwargs)


def test_a_step_by_megatrons_conventions_is_a_step_of_the_torch_backend(config: RunConfig, tmp_path: Path) -> None:
    from openforge.learner.backends.verl import VerlBackend

    plain = run_config(tmp_path / "model")
    ours, theirs = TorchBackend(plain), VerlBackend(config)
    batch = sequences(plain, ours.vocabulary)
    expected, found = ours.train(batch, 0), theirs.train(batch, 0)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    for left, right in zip(ours.logprobs(batch), theirs.logprobs(batch), strict=True):
        assert left == pytest.approx(right, abs=1e-4)


def test_a_checkpoint_of_megatrons_files_holds_the_policy_and_refuses_other_ranks_with_the_way_out(
    config: RunConfig, tmp_path: Path
) -> None:
    from openforge.learner.backends.verl import MARK, VerlBackend

    backend, state = VerlBackend(config), tmp_path / "state"
    backend.train(sequences(config, backend.vocabulary), 0)
    state.mkdir()
    backend.save(state)
    expected = {name: tensor.clone() for name, tensor in backend.export().items()}
    assert {name: tensor.float().tolist() for name, tensor in policy_parameters(state).items()} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }
    backend.train(sequences(config, backend.vocabulary), 1)
    backend.load(state)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in backend.export().items())
    (state / MARK).write_text('{"verl": "0.9.1", "ranks": 4}')
    with pytest.raises(BackendRefused, match=r"world_size = 4, or .* `openforge checkpoint export lineage OUT`"):
        backend.load(state)


def test_a_mixture_that_is_told_under_its_checkpoints_names_is_exported_under_the_models(
    config: RunConfig, tmp_path: Path
) -> None:
    from openforge.learner.backends.verl import VerlBackend

    model = tiny(tmp_path / "mixture", hidden=32, heads=2, kv_heads=1, experts=8)
    asked = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(model)))
    expected, found = TorchBackend(run_config(model)).export(), VerlBackend(asked).export()
    assert found.keys() == expected.keys()
    assert any(name.endswith(".experts.gate_up_proj") for name in found)
    assert all(torch.equal(tensor, expected[name].bfloat16().float()) for name, tensor in found.items())


def test_its_constructor_takes_what_the_registry_passes_on() -> None:
    names = ("model_config", "engine_config", "optimizer_config", "checkpoint_config")
    megatron("__init__").bind(None, **dict.fromkeys(names))


def test_parallelism_reaches_megatrons_config() -> None:
    from openforge.learner.backends.verl_engine import _configs
    from openforge.runs.config import LearnerSection

    options = VerlOptions(
        engine="megatron", tensor_parallel=2, pipeline_parallel=2, context_parallel=2, expert_parallel=4
    )
    name, engine, optimizer = _configs(LearnerSection(gradient_clip=0.5), options, seed=7)
    assert name == "megatron"
    sizes = (engine.tensor_model_parallel_size, engine.pipeline_model_parallel_size, engine.context_parallel_size)
    assert (*sizes, engine.expert_model_parallel_size, optimizer.clip_grad) == (2, 2, 2, 4, 0.5)


def megatron(method: str) -> inspect.Signature:
    """Of a method of verl's Megatron engine, read from its source; what it inherits, of the class it inherits from."""
    from verl.workers.engine import BaseEngine

    classes = {node.name: node for node in ast.parse(MEGATRON.read_text()).body if isinstance(node, ast.ClassDef)}
    for name in ("MegatronEngineWithLMHead", "MegatronEngine"):
        for node in classes[name].body:
            if isinstance(node, ast.FunctionDef) and node.name == method:
                return _signature(node)
    return inspect.signature(getattr(BaseEngine, method))


def _signature(node: ast.FunctionDef) -> inspect.Signature:
    for argument in (*node.args.args, *node.args.kwonlyargs, *filter(None, (node.args.vararg, node.args.kwarg))):
        argument.annotation = None
    node.returns, node.decorator_list, node.body = None, [], [ast.Pass()]
    scope: dict[str, Callable[..., Any]] = {}
    exec(compile(ast.fix_missing_locations(ast.Module([node], [])), str(MEGATRON), "exec"), scope)
    return inspect.signature(scope[node.name])
