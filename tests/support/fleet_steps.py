"""`python fleet_steps.py MODEL WORLD OUT SECTIONS [LOAD]`: some training steps on that many ranks, results in OUT.

What OUT/state holds is the state after the steps; with LOAD, what was loaded, saved again before the step.

SECTIONS is JSON: more of the sections `algorithm` and `learner`. Its entry `recorded` is a file of `mixtures.recorded`:
each step is then on the episodes in it, through the experts that they went through.
"""

import json
import sys
from pathlib import Path

import msgspec
from learner_world import run_config, verdict
from safetensors.torch import save_file

from openforge.learner.backends.choose import backend_for
from openforge.learner.backends.contract import Backend
from openforge.learner.routing import Replay
from openforge.learner.step import Step, batch_of, step_of
from openforge.protos import TrajectoryVerified
from openforge.runs import RunConfig


def main(model: str, world: str, out: str, sections: str, load: str = "") -> None:
    more = json.loads(sections)
    learner = {"world_size": int(world), "row_tokens": 48, "gradient_clip": 0.5, **more.get("learner", {})}
    config = run_config(Path(model), learner=learner, algorithm=more.get("algorithm", {}))
    backend = backend_for(config)
    folder = Path(out)
    if load:
        backend.load(Path(load))
        save(backend, folder)
    recorded, files = read(Path(more["recorded"])) if "recorded" in more else ([], {})
    seen = []
    for base in range(3 if not load else 1):
        first = base if not load else 3
        trajectories = recorded or [
            verdict(config, ordinal, member, 0) for ordinal in (first, first + 7) for member in range(4)
        ]
        step = made(config, backend, base, trajectories, files)
        stats = backend.train(step.sequences, base)
        seen.append(
            [
                stats.loss,
                stats.grad_norm,
                stats.ratio_mean,
                float(stats.loss_tokens),
                stats.critic_loss,
                stats.weight_zero,
            ]
        )
    logprobs = backend.logprobs(step.sequences)
    exported = {name: tensor.clone() for name, tensor in backend.export().items()}
    adapters = backend.adapters() if config.learner.lora.rank else {}
    weights = {name: tensor.double().sum().item() for name, tensor in {**exported, **adapters}.items()}
    if not load:
        save(backend, folder)
    save_file(exported, folder / "weights.safetensors")
    (folder / "seen.json").write_text(json.dumps({"steps": seen, "logprobs": logprobs, "weights": weights}))
    backend.close()


def made(
    config: RunConfig, backend: Backend, base: int, trajectories: list[TrajectoryVerified], files: dict[str, bytes]
) -> Step:
    groups = list(dict.fromkeys(one.group for one in trajectories))
    batch = batch_of(base, groups, {one.episode: one for one in trajectories}, 0)
    replay = None if backend.mixture is None else Replay(backend.mixture, files)
    return step_of(batch, config.algorithm, backend.vocabulary, replay)


def read(recorded: Path) -> tuple[list[TrajectoryVerified], dict[str, bytes]]:
    return msgspec.msgpack.decode(recorded.read_bytes(), type=tuple[list[TrajectoryVerified], dict[str, bytes]])


def save(backend: Backend, folder: Path) -> None:
    (folder / "state").mkdir(parents=True)
    backend.save(folder / "state")


if __name__ == "__main__":
    main(*sys.argv[1:])
