"""Steps of TRL's GRPOTrainer on a given batch, for `bench learner`: MODEL BATCH THREADS STEPS OUT.

Run by the interpreter that TRL is installed for. Promises: all of the step is TRL's own, from `train()` to the
optimizer; only what it would have generated is given, padded as TRL pads it. Gradient checkpointing is off, as in ours.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad

GROUP = 8
MICRO_BATCH = 8


class Clock(TrainerCallback):  # type: ignore[misc]
    """Runs from the first micro-batch until the optimizer has stepped."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began, self.began_cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.wall.append(time.perf_counter() - self.began)
        self.cpu.append(time.process_time() - self.began_cpu)


class Given(GRPOTrainer):  # type: ignore[misc]
    given: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return self.given


def main(folder: str, batch: str, threads: str, steps: str, out: str) -> None:
    torch.set_num_threads(int(threads))
    given = padded(json.loads(Path(batch).read_text()))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Given(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings(scratch, len(given["advantages"]), int(steps)),
            train_dataset=Dataset.from_dict({"prompt": ["x"] * (len(given["advantages"]) // GROUP)}),
            callbacks=[clock],
        )
        trainer.given = given
        warm_up(model)
        trainer.train()
    said = next(entry for entry in trainer.state.log_history if "grad_norm" in entry)
    columns = given["prompt_ids"].shape[1] + given["completion_ids"].shape[1]
    measured = {
        "step_s": statistics.median(clock.wall),
        "cpu_s": statistics.median(clock.cpu),
        "forwarded_tokens": len(given["advantages"]) * columns,
        "loss": said["loss"],
        "grad_norm": said["grad_norm"],
        "versions": {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
    }
    Path(out).write_text(json.dumps(measured))


def settings(scratch: str, sequences: int, steps: int) -> GRPOConfig:
    """DAPO's loss: clipped, mean over all tokens of the step."""
    return GRPOConfig(
        output_dir=scratch,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=sequences // MICRO_BATCH,
        num_generations=GROUP,
        max_steps=steps,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        temperature=1.0,
        learning_rate=1e-9,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def padded(sequences: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, completions on the right, to the longest of the whole batch: as TRL does."""

    def right(rows: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return pad([torch.tensor(row, dtype=dtype) for row in rows], padding_value=0, padding_side="right")

    prompts = [one["ids_T"][: one["at_K"][0]] for one in sequences]
    completions = [one["ids_T"][one["at_K"][0] :] for one in sequences]
    mask = right([[1] * len(ids) for ids in completions], torch.long)
    return {
        "prompt_ids": pad([torch.tensor(ids) for ids in prompts], padding_value=0, padding_side="left"),
        "prompt_mask": pad(
            [torch.ones(len(ids), dtype=torch.long) for ids in prompts], padding_value=0, padding_side="left"
        ),
        "completion_ids": right(completions, torch.long),
        "completion_mask": mask,
        "old_per_token_logps": right([one["mu_logprobs_K"] for one in sequences], torch.float32),
        "advantages": torch.tensor([one["advantage"] for one in sequences]),
        "num_items_in_batch": mask.sum(),
    }


def warm_up(model: Any) -> None:
    ids = torch.arange(3, 131)[None]
    model(input_ids=ids).logits.sum().backward()
    model.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
