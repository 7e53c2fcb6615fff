"""What of `[algorithm]` does not go together is refused with the field, the value and the way out."""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openforge.runs import RunConfig
from openforge.runs.rules import problems_of

ROOT = Path(__file__).resolve().parents[3]
RECIPES = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/algorithms.md").read_text(), re.DOTALL)


def config(**sections: dict[str, Any]) -> RunConfig:
    said = {
        "run": {"name": "rules", "steps": 1},
        "model": {"path": "m"},
        "environment": {"name": "shell", "harness": "mini-swe-agent"},
        **sections,
    }
    return msgspec.convert(said, RunConfig)


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        (
            {"algorithm": {"objective": "decoupled"}},
            'objective = "decoupled" with algorithm.loss = "reinforce_is": .* write loss = "ppo_clip"',
        ),
        (
            {"algorithm": {"loss": "ppo_clip", "correction": "token_tis"}},
            'correction = "token_tis" with algorithm.objective = "bypass" .* count twice; write correction = "none"',
        ),
        ({"algorithm": {"correction": "icepop", "ratio_floor": 3.0}}, "ratio_floor = 3 is not below .* 0.5 and 2.0"),
        ({"algorithm": {"loss": "ppo_clip", "dual_clip": 0.5}}, "dual_clip = 0.5 must be above 1"),
        ({"algorithm": {"dual_clip": 3.0}}, "dual_clip = 3 with .* only ppo_clip has a dual clip"),
        (
            {"algorithm": {"loss": "gspo", "aggregation": "sequence_mean", "clip_low": 3e-4}},
            'clip_high = 0.28 with algorithm.loss = "gspo".*3e-4 and 4e-4',
        ),
        (
            {"algorithm": {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}},
            'aggregation = "token_mean" with algorithm.loss = "gspo".*write aggregation = "sequence_mean"',
        ),
        ({"algorithm": {"aggregation": "constant"}}, "horizon = 0: write the constant to divide by"),
        ({"algorithm": {"horizon": 9}}, 'horizon = 9 with algorithm.aggregation = "token_mean" has no effect'),
        ({"algorithm": {"overlong_buffer": 9}}, "overlong_buffer = 9 without algorithm.overlong_tokens"),
        ({"algorithm": {"overlong_tokens": 5, "overlong_buffer": 9}}, "overlong_buffer = 9 is more than"),
        ({"algorithm": {"mini_batches": 9}}, "mini_batches = 9 is more than pacing.groups_per_step = 8"),
        ({"algorithm": {"gae_lambda": 0.9}}, 'gae_lambda = 0.9 .* write advantage = "gae", or leave gae_lambda out'),
        (
            {"algorithm": {"advantage": "gae", "loss": "ppo_clip"}, "learner": {"backend": "verl"}},
            "only the torch backend has a critic",
        ),
        ({"learner": {"backend": "verl", "lora": {"rank": 8}}}, "only the torch backend trains adapters"),
        ({"learner": {"lora": {"rank": 8, "targets": []}}}, "names no layer"),
        ({"learner": {"lora": {"rank": 8, "targets": ["all-linear", "q_proj"]}}}, "already is all of them"),
    ],
)
def test_what_does_not_go_together_is_refused(sections: dict[str, dict[str, Any]], problem: str) -> None:
    problems = problems_of(config(**sections))
    assert len(problems) == 1, problems
    assert re.search(problem, problems[0]), problems[0]


@pytest.mark.parametrize("recipe", RECIPES, ids=[text.split("\n", 1)[0].strip("# ") for text in RECIPES])
def test_every_published_recipe_of_the_page_is_a_valid_run(recipe: str) -> None:
    assert problems_of(config(**tomllib.loads(recipe))) == []


def test_the_page_has_the_recipes() -> None:
    assert len(RECIPES) >= 8
