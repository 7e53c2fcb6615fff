"""Losses against TRL 1.16.0: of given log-probs in float64, and of a whole step on the same model and batch."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from trl import GRPOTrainer

from openforge.learner.aggregation import token_weights
from openforge.learner.backends.torch_fsdp import TorchBackend
from openforge.learner.objective import LossTokens, token_losses
from openforge.learner.packing import TrainSequence
from openforge.models import tiny
from openforge.runs import RunConfig, config_of
from openforge.runs.config import AlgorithmSection

B, P, T = 6, 11, 13
LENGTHS = (13, 3, 9, 1, 12, 8)


def stub(loss_type: str, logps: Any, *, level: str = "token", low: float = 0.2, high: float = 0.28) -> Any:
    """As much of a trainer as its loss looks at."""

    class Accelerator:
        num_processes = 1

        def gather(self, value: torch.Tensor) -> torch.Tensor:
            return value

        def reduce(self, value: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
            return value

    return SimpleNamespace(
        _get_per_token_logps_and_entropies=logps,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=0.0,
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=T,
        _entropy_bonus_enabled=False,
        entropy_coef=0.0,
        use_adaptive_entropy=False,
        tools=None,
        environment_factory=None,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(),
        _metrics={"train": defaultdict(list)},
        temperature=1.0,
    )


def inputs_of(mask: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, ids: torch.Tensor) -> dict[str, Any]:
    return {
        "prompt_ids": ids[:, :P],
        "prompt_mask": torch.ones_like(ids[:, :P]),
        "completion_ids": ids[:, P:],
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }


def mask_of() -> torch.Tensor:
    mask = torch.zeros(B, T, dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1
    return mask


@pytest.mark.parametrize(
    ("loss_type", "level", "settings", "clips"),
    [
        ("grpo", "token", {"loss": "ppo_clip", "aggregation": "sequence_mean"}, (0.2, 0.28)),
        ("dapo", "token", {"loss": "ppo_clip", "aggregation": "token_mean"}, (0.2, 0.28)),
        ("dr_grpo", "token", {"loss": "ppo_clip", "aggregation": "constant", "horizon": T}, (0.2, 0.28)),
        ("grpo", "sequence", {"loss": "gspo", "aggregation": "sequence_mean"}, (3e-2, 4e-2)),
        ("cispo", "token", {"loss": "cispo", "aggregation": "token_mean"}, (0.2, 5.0)),
    ],
)
def test_losses_and_gradients_are_those_of_trl(
    loss_type: str, level: str, settings: dict[str, Any], clips: tuple[float, float]
) -> None:
    generator = torch.Generator().manual_seed(1)
    old = -2 * torch.rand(B, T, generator=generator, dtype=torch.float64) - 0.01
    new = old + 0.5 * torch.randn(B, T, generator=generator, dtype=torch.float64)
    advantages = torch.randn(B, generator=generator, dtype=torch.float64)
    mask, ids = mask_of(), torch.zeros(B, P + T, dtype=torch.long)
    theirs = new.clone().requires_grad_()
    trainer = stub(
        loss_type, lambda *a, **k: (theirs, torch.zeros_like(theirs), None), level=level, low=clips[0], high=clips[1]
    )
    expected = GRPOTrainer._compute_loss(trainer, None, inputs_of(mask, old, advantages, ids))
    expected.backward()

    low, high = (1.0, clips[1] - 1.0) if loss_type == "cispo" else clips
    algorithm = AlgorithmSection(**settings, clip_low=low, clip_high=high)
    kept = mask.bool()
    sequence_N = torch.arange(B)[:, None].expand(B, T)[kept]
    weights = token_weights(list(LENGTHS), range(B), algorithm.aggregation, algorithm.horizon)
    ours = new[kept].clone().requires_grad_()
    tokens = LossTokens(ours, old[kept], advantages[sequence_N], sequence_N)
    found = (torch.tensor(weights, dtype=torch.float64)[sequence_N] * token_losses(algorithm, tokens)).sum()
    found.backward()
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    assert ours.grad.tolist() == pytest.approx(theirs.grad[kept].tolist(), abs=1e-6)


@pytest.mark.parametrize(("loss_type", "aggregation"), [("grpo", "sequence_mean"), ("dapo", "token_mean")])
def test_a_step_on_the_same_model_and_batch_has_the_loss_and_gradient_norm_of_trl(
    tmp_path: Path, loss_type: str, aggregation: str
) -> None:
    model = tiny(tmp_path / "model", hidden=32, layers=2, heads=2, kv_heads=1)
    backend = TorchBackend(grpo(model, aggregation))
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, backend.vocabulary, (B, P + T), generator=generator)
    ids[:, :P] = ids[0, :P]  # one group: all share the prompt
    old = -6 + torch.randn(B, T, generator=generator)
    advantages = torch.randn(B, generator=generator)
    expected, norm = trl_step(model, loss_type, ids, old, advantages)

    weights = token_weights(list(LENGTHS), range(B), backend.algorithm.aggregation)
    stats = backend.train(
        [
            TrainSequence(
                ids_T=ids[row, : P + length].tolist(),
                at_K=list(range(P, P + length)),
                mu_logprobs_K=old[row, :length].tolist(),
                advantage=advantages[row].item(),
                weight=weights[row],
                temperature=1.0,
            )
            for row, length in enumerate(LENGTHS)
        ],
        0,
    )
    assert stats.loss == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)


def grpo(model: Path, aggregation: str) -> RunConfig:
    said = {
        "run": {"name": "oracle", "steps": 1},
        "model": {"path": str(model)},
        "environment": {"name": "letters", "harness": "direct"},
        "algorithm": {"loss": "ppo_clip", "aggregation": aggregation},
    }
    return config_of(msgspec.json.encode(said).decode())


def trl_step(
    folder: Path, loss_type: str, ids: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
) -> tuple[float, float]:
    """TRL's own forward and loss, and the norm of the gradient."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()

    def logps(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        logits = model(ids).logits[:, P - 1 : -1]
        chosen = logits.log_softmax(-1).gather(-1, ids[:, P:, None])[..., 0]
        return chosen, torch.zeros_like(chosen), None

    loss = GRPOTrainer._compute_loss(stub(loss_type, logps), model, inputs_of(mask_of(), old, advantages, ids))
    loss.backward()
    return loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
