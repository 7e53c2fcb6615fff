"""What the learner's rows are worth: `python -m openforge.cli.bench.learner --json`.

One training step in the learner's rows, in a plain loop over transformers and in TRL's GRPOTrainer: same machine,
threads, model, batch and loss, one after the other. `long_tailed` is 256 sequences of log-normal lengths (median 300,
p99/p50 = 10, at most 2,048), `one_group` is eight completions of one prompt. A rate is the tokens of the sequences over
the time of the step, whatever was computed for them; beside it stands the rate over its CPU time, for machines that are
not idle.

The model is one layer as wide as SmolLM2-135M's, with a thirtieth of its vocabulary: layer, attention and head have
the same shares of the work as there. `--model` takes a checkpoint folder instead.
"""

import argparse
import asyncio
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from openforge.cli.bench import _learner_batches as batches
from openforge.cli.bench._peers import NotMeasured, installed
from openforge.learner.packing import TrainSequence
from openforge.models import tiny

TRL = "1.16.0"
REQUIREMENTS = ("torch==2.13.0", "transformers==5.18.0", f"trl=={TRL}")
VOCABULARY = 1638


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """`trl` is the interpreter that has TRL, or why there is none."""

    model: str
    threads: int
    scratch: Path
    trl: Path | str

    def rows(self, batch: Path, steps: int, ranks: int = 1) -> dict[str, Any]:
        return self._learner("--batch", str(batch), "--steps", str(steps), "--way", "rows", "--ranks", str(ranks))

    def padded(self, batch: Path, steps: int) -> dict[str, Any]:
        return self._learner("--batch", str(batch), "--steps", str(steps), "--way", "padded")

    def peer(self, batch: Path, steps: int) -> dict[str, Any]:
        if isinstance(self.trl, str):
            return {"reason": self.trl}
        out = self.scratch / "trl.json"
        script = Path(__file__).with_name("_peer_trl.py")
        self._run([str(self.trl), str(script), self.model, str(batch), str(self.threads), str(steps), str(out)])
        return msgspec.json.decode(out.read_bytes(), type=dict[str, Any])

    def _learner(self, *more: str) -> dict[str, Any]:
        """In a process of its own, since threads are set once."""
        said = self._run(
            [
                *(sys.executable, "-m", "openforge.learner.bench", "--model", self.model),
                *("--threads", str(self.threads), *more),
            ]
        )
        return msgspec.json.decode(said, type=dict[str, Any])

    def _run(self, command: Sequence[str]) -> bytes:
        env = os.environ | {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}
        return subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else on stdout")
    parser.add_argument("--model", default="", help="a checkpoint folder with a tokenizer")
    parser.add_argument("--sequences", type=int, default=batches.SEQUENCES, help="of `long_tailed`, a multiple of 8")
    parser.add_argument("--only", choices=("long_tailed", "one_group"), default="", help="one batch of the two")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"), help="TRL is installed below this folder")
    asked = parser.parse_args()
    if asked.sequences % 8:
        parser.error(f"--sequences {asked.sequences}: TRL trains groups of 8; give a multiple of it")
    trl = asyncio.run(interpreter(asked.peers.absolute()))
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(asked.model, asked.sequences, asked.threads, Path(scratch), trl, asked.only)
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n" if asked.json else told(found))


async def interpreter(peers: Path) -> Path | str:
    """One that has TRL: this one, or that of a venv which is made where it is missing. Or why not."""
    if importlib.util.find_spec("trl") is not None:
        return Path(sys.executable)
    try:
        return await installed("trl", TRL, REQUIREMENTS, peers)
    except NotMeasured as error:
        return str(error)


def measure(model: str, sequences: int, threads: int, scratch: Path, trl: Path | str, only: str = "") -> dict[str, Any]:
    folder = model or str(tiny(scratch / "model", layers=1, hidden=576, heads=9, kv_heads=3, vocabulary=VOCABULARY))
    bench = Bench(model=folder, threads=threads, scratch=scratch, trl=trl)
    vocabulary = _vocabulary(folder)
    long_tailed, one_group = batches.long_tailed(vocabulary, sequences), batches.one_group(vocabulary)
    found: dict[str, Any] = {"packing_efficiency": batches.packing_efficiency(long_tailed)}
    compared_batches = dict[str, Any]()
    if only != "long_tailed":
        compared_batches["one_group"] = one = compared(bench, "one_group", one_group, steps=3)
        found |= ratios(one, "_one_group")
    if only != "one_group":
        compared_batches["long_tailed"] = many = compared(bench, "long_tailed", long_tailed, steps=1)
        two = bench.rows(_written(scratch, "long_tailed", long_tailed), steps=1, ranks=2)
        many["rows_on_two_ranks"] = two
        found |= ratios(many, "") | {"gloo2_efficiency": many["rows"]["step_s"] / (2 * two["step_s"])}
    return found | {
        "model": model or "one layer of SmolLM2-135M's width, random weights",
        "threads": threads,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "batches": compared_batches,
    }


def compared(bench: Bench, name: str, sequences: Sequence[TrainSequence], steps: int) -> dict[str, Any]:
    batch = _written(bench.scratch, name, sequences)
    rows, padded, trl = bench.rows(batch, steps), bench.padded(batch, steps), bench.peer(batch, steps)
    tokens = sum(len(one.ids_T) for one in sequences)
    return {
        "sequences": len(sequences),
        "tokens": tokens,
        "loss_tokens": sum(len(one.at_K) for one in sequences),
        "tokens_per_s": tokens / rows["step_s"],
        "rows": rows,
        "padded": padded,
        "trl": trl,
    }


def ratios(batch: dict[str, Any], ending: str) -> dict[str, float | None]:
    """Our rate over that of the others, by the clock and by CPU time."""
    return {
        f"tokens_per_{unit}_ratio_{other}{ending}": batch[other][time] / batch["rows"][time]
        if time in batch[other]
        else None
        for other in ("trl", "padded")
        for unit, time in (("s", "step_s"), ("cpu_s", "cpu_s"))
    }


def told(found: dict[str, Any]) -> str:
    lines = [f"{found['model']}, {found['threads']} thread(s) on {found['cores']} cores"]
    for name, batch in found["batches"].items():
        lines.append(f"{name}: {batch['sequences']} sequences of {batch['tokens']} tokens")
        for way in ("rows", "padded", "trl", "rows_on_two_ranks"):
            one = batch.get(way, {})
            if "step_s" in one:
                lines.append(
                    f"  {way:<18}{one['step_s']:8.1f} s {one['cpu_s']:8.1f} CPU-s "
                    f"{one['forwarded_tokens']:8} tokens computed  "
                    f"loss {one['loss']:.6f}  gradient norm {one['grad_norm']:.6f}"
                )
            elif "reason" in one:
                lines.append(f"  {way:<18}not measured: {one['reason']}")
    lines += [f"{name}: {value}" for name, value in found.items() if isinstance(value, float)]
    return "\n".join(lines) + "\n"


def _written(scratch: Path, name: str, sequences: Sequence[TrainSequence]) -> Path:
    path = scratch / f"{name}.json"
    path.write_bytes(msgspec.json.encode(sequences))
    return path


def _vocabulary(folder: str) -> int:
    return int(msgspec.json.decode(Path(folder, "config.json").read_bytes())["vocab_size"])


if __name__ == "__main__":
    main()
