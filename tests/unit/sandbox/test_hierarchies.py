"""Which control group hierarchy is used for what, from the mount table alone."""

from pathlib import Path

import pytest

from openforge.sandbox.process.cgroups import NoLimits, find_hierarchies

V1 = "cgroup {root}/{name} cgroup rw,relatime,{name} 0 0\n"


def mounts_of(root: Path, v1: tuple[str, ...], v2: str | None) -> str:
    text = "".join(V1.format(root=root, name=name) for name in v1)
    if v2 is not None:
        (root / "unified").mkdir()
        (root / "unified" / "cgroup.controllers").write_text(v2)
        text += f"cgroup2 {root}/unified cgroup2 rw 0 0\n"
    return text


def test_a_host_of_version_2(tmp_path: Path) -> None:
    found = find_hierarchies(mounts_of(tmp_path, (), "cpuset cpu io memory pids"))
    assert found.v1 == {}
    assert found.v2_limits == ("memory", "pids", "cpu")
    assert found.kill_root == f"{tmp_path}/unified"


def test_a_host_of_version_1(tmp_path: Path) -> None:
    found = find_hierarchies(mounts_of(tmp_path, ("memory", "pids", "cpu,cpuacct", "freezer"), None))
    assert set(found.v1) == {"memory", "pids", "cpu", "freezer"}
    assert found.v2_limits == ()
    assert found.kill_root == f"{tmp_path}/freezer"


def test_a_hybrid_host_is_limited_by_version_1_and_killed_by_version_2(tmp_path: Path) -> None:
    found = find_hierarchies(mounts_of(tmp_path, ("memory", "pids", "cpu", "freezer"), ""))
    assert found.v2_limits == ()
    assert found.kill_root == f"{tmp_path}/unified"


def test_a_host_that_splits_controllers_uses_both(tmp_path: Path) -> None:
    found = find_hierarchies(mounts_of(tmp_path, ("memory",), "pids cpu"))
    assert set(found.v1) == {"memory"}
    assert found.v2_limits == ("pids", "cpu")


@pytest.mark.parametrize(
    ("v1", "v2", "missing"),
    [((), "cpu memory", "pids"), (("memory", "pids", "cpu"), None, "freezer"), ((), None, "memory, pids, cpu")],
)
def test_what_is_missing_is_named(tmp_path: Path, v1: tuple[str, ...], v2: str | None, missing: str) -> None:
    with pytest.raises(NoLimits, match=missing):
        find_hierarchies(mounts_of(tmp_path, v1, v2))
