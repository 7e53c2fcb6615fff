"""The table of harnesses and their folders, without installing anything."""

from pathlib import Path

import pytest

from openforge.harnesses import ALL, Harness, Launch, NotInstalled, UnknownHarness, command, find, home_of
from openforge.harnesses.install import CannotInstall, made_once, refuse_other_version

LAUNCH = Launch(
    base_url="http://127.0.0.1:8080/ep/e1.0",
    key="the-key",
    model="policy",
    instruction="Do it.",
    context=32768,
    max_tokens=512,
)


@pytest.fixture
def all_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFORGE_HARNESSES", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda program: f"/usr/bin/{program}")
    for folder in (*map(home_of, ALL), tmp_path / "node-24.19.0"):
        folder.mkdir()
        (folder / ".installed").touch()


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize("harness", ALL, ids=lambda harness: harness.name)
def test_every_harness_is_told_the_attempts_url_and_key_and_works_in_the_workspace(harness: Harness) -> None:
    agent = command(harness, LAUNCH)
    told = b"\n".join([*agent.files.values(), *(f"{k}={v}".encode() for k, v in agent.env.items())])
    assert LAUNCH.base_url.encode() in told
    assert b"the-key" in told
    assert "Do it." in (*agent.argv, *agent.env.values())
    assert "the-key" not in " ".join(agent.argv)
    assert agent.cwd == "/workspace"
    assert agent.binds["/opt/harness"] == str(home_of(harness))
    assert not any(path.startswith("/workspace") for path in agent.files)


def test_a_harness_that_is_not_installed_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFORGE_HARNESSES", str(tmp_path))
    with pytest.raises(NotInstalled, match=r"openforge conformance --install pi"):
        command(find("pi"), LAUNCH)


def test_an_unknown_harness_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(UnknownHarness, match=r"'pie' .* pi, mini-swe-agent, codex"):
        find("pie")


def test_names_are_unique_and_versions_pinned() -> None:
    assert len({harness.name for harness in ALL}) == len(ALL) >= 12
    assert all(harness.version[0].isdigit() for harness in ALL)


def test_what_a_broken_installation_left_is_removed_and_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "pi-1"

    def breaks(made: Path) -> None:
        (made / "half").write_text("")
        raise CannotInstall("the network is gone")

    def works(made: Path) -> None:
        (made / "whole").write_text("")
        (made / "whole").chmod(0o600)

    with pytest.raises(CannotInstall):
        made_once(folder, breaks)
    made_once(folder, works)
    made_once(folder, breaks)  # it is there
    assert sorted(path.name for path in folder.iterdir()) == [".installed", "whole"]
    assert (folder / "whole").stat().st_mode & 0o777 == 0o644


def test_another_version_than_the_pinned_one_is_refused() -> None:
    refuse_other_version("codex-cli 0.171.0\n", "0.171.0", "codex")
    with pytest.raises(CannotInstall, match=r"'0\.0\.1' and 2026\.9\.6 is pinned"):
        refuse_other_version("0.0.1\n", "2026.9.6", "openclaw")
