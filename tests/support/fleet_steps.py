"""`python fleet_steps.py MODEL WORLD OUT SECTIONS [LOAD]`: some training steps on that many ranks, results in OUT.

What OUT/state holds is the state after the steps; with LOAD, what was loaded, saved again before the step.

SECTIONS is JSON: more of the sections `algorithm` and `learner`.
"""

import json
import sys
from pathlib import Path

from learner_world import run_config, verdict
from safetensors.torch import save_file

from openforge.learner.backends.choose import backend_for
from openforge.learner.backends.contract import Backend
from openforge.learner.step import batch_of, step_of


def main(model: str, world: str, out: str, sections: str, load: str = "") -> None:
    more = json.loads(sections)
    learner = {"world_size": int(world), "row_tokens": 48, "gradient_clip": 0.5, **more.get("learner", {})}
    config = run_config(Path(model), learner=learner, algorithm=more.get("algorithm", {}))
    backend = backend_for(config)
    folder = Path(out)
    if load:
        backend.load(Path(load))
        save(backend, folder)
    seen = []
    for base in range(3 if not load else 1):
        first = base if not load else 3
        trajectories = [verdict(config, ordinal, member, 0) for ordinal in (first, first + 7) for member in range(4)]
        groups = list(dict.fromkeys(one.group for one in trajectories))
        batch = batch_of(base, groups, {one.episode: one for one in trajectories}, 0)
        step = step_of(batch, config.algorithm, backend.vocabulary)
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


def save(backend: Backend, folder: Path) -> None:
    (folder / "state").mkdir(parents=True)
    backend.save(folder / "state")


if __name__ == "__main__":
    main(*sys.argv[1:])
