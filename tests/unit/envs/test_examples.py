"""Every run file in `examples/` is one that could be run."""

from pathlib import Path

import pytest

from openforge.learner.backends.options import torch_options, verl_options
from openforge.runs import load_run_file
from openforge_envs.shell.env import tasks
from openforge_envs.shell.instances import ShellTask

EXAMPLES = sorted(Path(__file__).parents[3].glob("examples/*.toml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_run_file_is_accepted(file: Path) -> None:
    config = load_run_file(file)
    assert config.run.name
    assert config.pacing.in_flight >= config.pacing.group_size
    {"torch": torch_options, "verl": verl_options}[config.learner.backend](config.learner.backend_options)


def test_the_demo_draws_from_the_kinds_with_a_foothold() -> None:
    demo = load_run_file(next(file for file in EXAMPLES if file.stem == "demo"))
    with_foothold = {task.id for task in tasks() if isinstance(task, ShellTask) and "foothold" in task.tags}
    assert set(demo.environment.tasks) == with_foothold
