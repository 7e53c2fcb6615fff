"""Which published weights are due."""

from openforge.engine.policy import Newest
from openforge.protos import PolicyPublished


def _published(version: int, incarnation: int = 0) -> PolicyPublished:
    name = f"{version}-{incarnation}"
    return PolicyPublished(run="r", version=version, incarnation=incarnation, location=f"/w/{name}", digest=name)


def test_only_the_newest_is_due() -> None:
    newest = Newest()
    assert newest.due() is None
    for version in (0, 2, 1):
        newest.apply(_published(version))
    assert newest.due() == _published(2)


def test_what_is_served_is_not_due_again_and_versions_only_go_forward() -> None:
    newest = Newest()
    newest.apply(_published(2))
    newest.serves(_published(2))
    newest.apply(_published(1))
    newest.apply(_published(2))
    assert newest.due() is None
    newest.apply(_published(3))
    assert newest.due() == _published(3)


def test_another_incarnation_of_the_served_version_is_due() -> None:
    newest = Newest()
    newest.serves(_published(4))
    newest.apply(_published(4, 1))
    assert newest.due() == _published(4, 1)


def test_refused_weights_are_not_tried_again_and_the_next_newest_stands_in_if_nothing_is_served() -> None:
    newest = Newest()
    newest.apply(_published(1))
    newest.apply(_published(2))
    newest.refuses(_published(2))
    assert newest.due() == _published(1)
    newest.serves(_published(1))
    newest.apply(_published(2))
    assert newest.due() is None
