"""Which driver a service gets by its settings, and what it is told where that one cannot be had."""

from pathlib import Path

import pytest

from openforge.sandbox.choice import DriverSettings, open_driver
from openforge.sandbox.contract import CannotIsolate
from openforge.service.settings import settings_from_env


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"DRIVER": "docker", "SOCKET": "/nowhere/docker.sock"}, "/nowhere/docker.sock.*OPENFORGE_SANDBOX_SOCKET"),
        ({"DRIVER": "kubernetes"}, "OPENFORGE_SANDBOX_TOOLBOX"),
        ({"DRIVER": "kubernetes", "TOOLBOX": "t:1", "KUBECONFIG": "/nowhere/config"}, "no way to a cluster"),
    ],
)
async def test_a_driver_that_cannot_be_had_is_refused_with_what_would_help(
    env: dict[str, str], named: str, tmp_path: Path
) -> None:
    settings = settings_from_env(DriverSettings, {f"OPENFORGE_SANDBOX_{name}": value for name, value in env.items()})
    with pytest.raises(CannotIsolate, match=named):
        await open_driver(settings, tmp_path, owner="test")
