"""Two ranks compute what one computes, and load what one saved."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fleet_steps
import mixtures
import msgspec
import pytest
from fleet_runs import close, furthest, same_state, steps
from learner_world import run_config, tiny_model

from openforge.learner.backends.fleet import without_routing
from openforge.learner.backends.ranks import deals, share
from openforge.learner.packing import pack
from openforge.learner.routing import Mixture, Replay
from openforge.learner.step import batch_of, step_of
from openforge.protos import TrajectoryVerified
from openforge.service import BAD_SETTINGS

EVERYTHING = {
    "algorithm": {
        "advantage": "gae",
        "loss": "ppo_clip",
        "objective": "decoupled",
        "correction": "icepop",
        "kl_coefficient": 0.1,
        "aggregation": "episode_mean",
        "mini_batches": 2,
    },
    "learner": {"lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}, "critic_learning_rate": 1e-3},
}


# Rank 0 is slow: it finds nothing out by itself.
SLOW = """
import sys, threading
from pathlib import Path
from learner_world import run_config
from openforge.learner.backends import choose, fleet
choose.backend_of_rank = lambda config: threading.Event().wait()
fleet._GRACE_S = 0.0
fleet.Fleet(run_config(Path(sys.argv[1]), learner={"world_size": 2, "backend_options": {"no_such": True}}))
"""


def test_bad_settings_that_a_rank_refuses_before_rank_0_end_it_as_such(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOW, str(tiny_model(tmp_path))]
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ended = subprocess.run(
        command, env=alone | {"PYTHONPATH": os.pathsep.join(sys.path)}, stderr=subprocess.PIPE, timeout=300
    )
    assert b'"bad settings","why":"learner.backend_options = ' in ended.stderr
    assert ended.returncode == BAD_SETTINGS


def test_two_ranks_equal_one_and_checkpoints_change_hands(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    alone = steps(model, 1, tmp_path / "one")
    together = steps(model, 2, tmp_path / "two")
    assert close(alone["steps"], together["steps"], 1e-5)
    assert close(alone["logprobs"], together["logprobs"], 1e-5)
    assert furthest(tmp_path / "one", tmp_path / "two") < 1e-5
    resumed = steps(model, 1, tmp_path / "resumed", tmp_path / "two/state")
    spread = steps(model, 2, tmp_path / "spread", tmp_path / "one/state")
    assert close(resumed["steps"], spread["steps"], 1e-4)


def test_weights_and_optimizer_are_the_same_bits_however_many_ranks_hold_them(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    steps(model, 2, tmp_path / "two")
    steps(model, 1, tmp_path / "one", tmp_path / "two/state")
    steps(model, 2, tmp_path / "back", tmp_path / "one/state")
    assert same_state(tmp_path / "two/state", tmp_path / "one/state")
    assert same_state(tmp_path / "two/state", tmp_path / "back/state")


def test_each_rank_replays_the_experts_of_its_own_rows(tmp_path: Path) -> None:
    """The routers have changed since, so who replays nothing computes something else: half the batch left to them shows
    what a second rank without replay would do."""
    model = mixtures.mixture(tmp_path / "sampled")
    members, files = mixtures.episodes(run_config(model), model)
    changed = mixtures.turned(model, tmp_path / "changed", files)
    untold = [
        msgspec.structs.replace(
            one, sequences=tuple(msgspec.structs.replace(seq, routed_experts=(), routed_at=()) for seq in one.sequences)
        )
        for one in members[2:]
    ]

    def sections(name: str, members: list[TrajectoryVerified]) -> dict[str, object]:
        recorded = mixtures.recorded(tmp_path / f"{name}.msgpack", members, files)
        return {"recorded": str(recorded), "learner": {"routing_replay": True}}

    together = steps(changed, 2, tmp_path / "two", sections=sections("all", members))
    alone = here(changed, tmp_path / "one", sections("all", members))
    half = here(changed, tmp_path / "half", sections("half", [*members[:2], *untold]))
    assert close(alone["steps"], together["steps"], 1e-5)
    assert close(alone["logprobs"], together["logprobs"], 1e-5)
    assert furthest(tmp_path / "one", tmp_path / "two") < 1e-5
    assert not close(alone["steps"], half["steps"], 0.1)
    assert furthest(tmp_path / "one", tmp_path / "half") > 1e-3


def here(model: Path, out: Path, sections: dict[str, object]) -> dict[str, object]:
    """On one rank, in this process."""
    fleet_steps.main(str(model), "1", str(out), json.dumps(sections))
    return dict(json.loads((out / "seen.json").read_text()))


def test_a_rank_is_told_of_the_experts_of_its_own_rows_and_of_no_others(tmp_path: Path) -> None:
    model = mixtures.mixture(tmp_path / "model")
    config = run_config(model)
    members, files = mixtures.episodes(config, model, members=5)
    batch = batch_of(0, [members[0].group], {one.episode: one for one in members}, 0)
    mixture = Mixture(layers=2, experts=mixtures.EXPERTS, per_token=2)
    sequences = step_of(batch, config.algorithm, 259, Replay(mixture, files)).sequences
    assert all(one.routing is not None for one in sequences)
    assert all(one.routing is None for one in without_routing(sequences)), "nothing of it goes to everyone"
    rows = pack(sequences, 28)
    dealt = deals(rows, range(2))
    assert [len(own) for own in dealt] == [3, 3]
    for rank, own in enumerate(dealt):
        rows_of_rank = share(rows, rank, 2)
        assert [row.routing if part else None for row, part in rows_of_rank] == own
    told = [routing for own in dealt for routing in own if routing is not None]
    assert len(told) == len(rows) == 5
    assert all(any(routing is row.routing for routing in told) for row in rows)
    assert deals(rows, [0, 0, 1, 1]) == [dealt[0], dealt[0], dealt[1], dealt[1]], (
        "two ranks compute each model together"
    )


@pytest.mark.heavy
def test_critic_reference_centre_and_adapters_are_the_same_on_two_ranks(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    alone = steps(model, 1, tmp_path / "one", sections=EVERYTHING)
    together = steps(model, 2, tmp_path / "two", sections=EVERYTHING)
    assert close(alone["steps"], together["steps"], 1e-4)
    assert close(alone["logprobs"], together["logprobs"], 1e-4)
    assert any("lora_A" in name for name in alone["weights"]), "adapters alone are published from any number of ranks"
    assert close(alone["weights"], together["weights"], 1e-3)
    resumed = steps(model, 1, tmp_path / "resumed", tmp_path / "two/state", EVERYTHING)
    spread = steps(model, 2, tmp_path / "spread", tmp_path / "one/state", EVERYTHING)
    assert close(resumed["steps"], spread["steps"], 1e-3)
