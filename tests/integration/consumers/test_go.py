"""The consumer in Go sees every trajectory once, and the numbers that were told."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from consumers import ROOT, reads_every_trajectory_once_over_restarts
from needed import needs

GOCODE = Path("/usr/share/gocode")  # where Debian keeps the sources of packages
EXAMPLE = ROOT / "examples/consumers/go"
PACKAGES = {
    "github.com/nats-io/nats.go": "golang-github-nats-io-go-nats-dev",
    "github.com/nats-io/nkeys": "golang-github-nats-io-nkeys-dev",
    "github.com/klauspost/compress": "golang-github-klauspost-compress-dev",
    "github.com/vmihailenco/msgpack/v5": "golang-github-vmihailenco-msgpack.v5-dev",
}

pytestmark = [pytest.mark.consumers, needs("go", "gofmt", "dpkg-query")]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built with the libraries that Debian packages."""
    built = tmp_path_factory.mktemp("go") / "consumer"
    env = os.environ | {"GO111MODULE": "off", "GOPATH": str(GOCODE), "GOFLAGS": "", "GOTOOLCHAIN": "local"}
    for command in (("vet", "."), ("build", "-o", str(built), ".")):
        subprocess.run(("go", *command), cwd=EXAMPLE, env=env, check=True, timeout=900)
    return built


def test_the_example_is_formatted_as_go_is() -> None:
    assert subprocess.check_output(("gofmt", "-l", "."), cwd=EXAMPLE, text=True) == ""


def test_go_mod_asks_for_the_versions_that_are_tried_here() -> None:
    """Whoever has a module proxy builds what we built without one."""
    asked = dict(re.findall(r"^\t(\S+) v([\d.]+)$", (EXAMPLE / "go.mod").read_text(), re.MULTILINE))
    installed = subprocess.check_output(
        ("dpkg-query", "-W", "-f", "${Package} ${Version}\n", *PACKAGES.values()), text=True
    )
    packaged = dict(line.split() for line in installed.splitlines())
    assert asked == {module: re.split(r"[+-]", packaged[package])[0] for module, package in PACKAGES.items()}


async def test_every_trajectory_once_with_its_values_over_restarts_of_server_and_consumer(
    program: Path, tmp_path: Path
) -> None:
    await reads_every_trajectory_once_over_restarts((str(program),), tmp_path)
