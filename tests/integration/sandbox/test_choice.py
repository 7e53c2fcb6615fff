"""Which driver a service gets by its settings, and what it is told where that one cannot be had."""

from pathlib import Path

import pytest

from openforge.sandbox.choice import DriverSettings, open_driver, with_runtime
from openforge.sandbox.contract import CannotIsolate
from openforge.service.settings import settings_from_env


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"DRIVER": "docker", "SOCKET": "/nowhere/docker.sock"}, "/nowhere/docker.sock.*OPENFORGE_SANDBOX_SOCKET"),
        ({"DRIVER": "kubernetes"}, "OPENFORGE_SANDBOX_TOOLBOX"),
        ({"DRIVER": "kubernetes", "TOOLBOX": "t:1", "PROXY": "$(PROXY_SERVICE_HOST):8400"}, "is no IP:PORT"),
        ({"DRIVER": "kubernetes", "TOOLBOX": "t:1", "PROXY": "10.96.0.7:8400", "KUBECONFIG": "/nowhere"}, "no way to"),
        ({"DRIVER": "kubernetes", "TOOLBOX": "t:1", "KUBECONFIG": "/nowhere/config"}, "no way to a cluster"),
    ],
)
async def test_a_driver_that_cannot_be_had_is_refused_with_what_would_help(
    env: dict[str, str], named: str, tmp_path: Path
) -> None:
    settings = settings_from_env(DriverSettings, {f"OPENFORGE_SANDBOX_{name}": value for name, value in env.items()})
    with pytest.raises(CannotIsolate, match=named):
        await open_driver(settings, tmp_path, owner="test")


def test_a_run_file_may_name_the_runtime_where_the_driver_has_any() -> None:
    docker = DriverSettings(sandbox_driver="docker", sandbox_runtime="crun")
    assert with_runtime(docker, "runsc").sandbox_runtime == "runsc"
    assert with_runtime(docker, "").sandbox_runtime == "crun"
    assert with_runtime(DriverSettings(), "") == DriverSettings()
    with pytest.raises(CannotIsolate, match=r"environment\.runtime = 'runsc': sandboxes of driver process share"):
        with_runtime(DriverSettings(), "runsc")
