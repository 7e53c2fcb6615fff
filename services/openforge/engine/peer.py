"""What the embedded engine is measured against: `generate` of transformers, on the same prompts.

`python -m openforge.engine.peer --model FOLDER`: each line on stdin is a JSON list of prompts of equal length; each
is answered with a line of JSON on stdout.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m openforge.engine.peer", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=1.0)
    return parser.parse_args()


def _load(arguments: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(arguments.threads)
    return AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype)).eval()


def _generate(model: Any, prompts: list[list[int]], arguments: argparse.Namespace) -> dict[str, float]:
    import torch

    ids = torch.tensor(prompts)
    wall, cpu = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=arguments.temperature,
            top_k=0,
            min_new_tokens=arguments.new_tokens,
            max_new_tokens=arguments.new_tokens,
        )
    tokens = (answer.shape[1] - ids.shape[1]) * len(prompts)
    return {"tokens": tokens, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def main() -> None:
    arguments = _arguments()
    os.environ |= {"OMP_NUM_THREADS": str(arguments.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    model = _load(arguments)
    for line in sys.stdin:
        print(json.dumps(_generate(model, json.loads(line), arguments)), flush=True)


if __name__ == "__main__":
    main()
