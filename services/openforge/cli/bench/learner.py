"""What prefix-sharing rows are worth in training: `python -m openforge.cli.bench.learner --json`.

One step of SmolLM2-135M on a batch shaped like the demo's, in the learner's rows and in padded batches of one
sequence a row, with one thread and with two. Takes some minutes.
"""

import argparse
import os
import subprocess
import sys
from typing import Any

import msgspec

from openforge.models import get


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else on stdout")
    parser.add_argument("--model", default="", help="a checkpoint folder; SmolLM2-135M where it is left out")
    parser.add_argument("--groups", type=int, default=2)
    asked = parser.parse_args()
    model = asked.model or str(get("smollm2-135m"))
    measured = [measure(model, threads, asked.groups) for threads in (1, 2)]
    if asked.json:
        sys.stdout.write(msgspec.json.encode({"model": model, "measured": measured}).decode() + "\n")
        return
    for one in measured:
        rows, padded = one["rows"], one["padded"]
        sys.stdout.write(
            f"{one['threads']} threads: {one['sequences']} sequences of {one['sequence_tokens']} tokens\n"
            f"  rows    {rows['step_s']:6.1f} s  {rows['forwarded_tokens']:6.0f} tokens computed  "
            f"{rows['trained_tokens_per_s']:6.0f} trained tokens/s\n"
            f"  padded  {padded['step_s']:6.1f} s  {padded['forwarded_tokens']:6.0f} tokens computed  "
            f"{padded['trained_tokens_per_s']:6.0f} trained tokens/s\n"
            f"  {one['speedup']:.1f} times quicker\n"
        )


def measure(model: str, threads: int, groups: int) -> dict[str, Any]:
    """In a process of its own, since a service is not imported here and threads are set once."""
    command = [sys.executable, "-m", "openforge.learner.bench", "--model", model, "--threads", str(threads)]
    done = subprocess.run(
        [*command, "--groups", str(groups)],
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        check=True,
    )
    return msgspec.json.decode(done.stdout, type=dict[str, Any])


if __name__ == "__main__":
    main()
