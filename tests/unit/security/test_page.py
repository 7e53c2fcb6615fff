"""docs/security.md: every test and every attack that it names exists, and it names every attack."""

import re
from pathlib import Path

from attacks import bombs, host, kernel, leavings, network
from attacks.hacks import CALLS_OF_OTHERS, HACKS, KEY_LEFT_BEHIND

ROOT = Path(__file__).parents[3]
ATTACKS = {attack.name for room in (bombs, host, kernel, leavings, network) for attack in room.ATTACKS}
HACK_NAMES = {hack.name for hack in (*HACKS, CALLS_OF_OTHERS, KEY_LEFT_BEHIND)}


def named() -> set[str]:
    return set(re.findall(r"`([\w-]+)`", (ROOT / "docs/security.md").read_text()))


def test_every_test_that_the_page_names_exists() -> None:
    defined = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.M)
    }
    names = {name for name in named() if name.startswith("test_")}
    assert len(names) > 30
    assert names - defined == set()


def test_the_page_names_every_attack_and_none_that_is_not_made() -> None:
    assert (ATTACKS | HACK_NAMES) - named() == set()
    with_dashes = {name for name in named() if "-" in name}
    assert with_dashes - ATTACKS - HACK_NAMES == set()
