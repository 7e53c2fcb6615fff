"""A subject ends in its fact's natural key, and streams do not overlap."""

import fnmatch
import re
from pathlib import Path

import pytest
from fact_examples import DEAD_LETTER, FACTS

from openforge.protos import BadKey, Fact, RunPaused, TurnRecorded
from openforge.protos.schema import address, key_names

SUBJECTS = {
    "RunSubmitted": "of.demo.run.submitted.0",
    "RunPaused": "of.demo.run.paused.1",
    "RunStopped": "of.demo.run.stopped.2",
    "GroupOpened": "of.demo.group.opened.g000012",
    "GroupClosed": "of.demo.group.closed.g000012",
    "EpisodeRequested": "of.demo.episode.requested.g000012-3.1",
    "EpisodeStarted": "of.demo.episode.started.g000012-3.1",
    "EpisodeEnded": "of.demo.episode.ended.g000012-3.1",
    "EpisodeSealed": "of.demo.episode.sealed.g000012-3.1",
    "EpisodeFailed": "of.demo.episode.failed.g000012-3.1",
    "TurnRecorded": "of.demo.turn.g000012-3.1.2",
    "TrajectoryVerified": "of.demo.trajectory.shell.mini-swe-agent.g000012-3",
    "BatchTrained": "of.demo.policy.trained.4",
    "TrajectoryRetired": "of.demo.policy.retired.g000012-5",
    "PolicyPublished": "of.demo.policy.published.4.0",
    "PolicyServed": "of.demo.policy.served.4.0.engine-0",
    "EngineMeasured": "of.demo.policy.measured.engine-0.1750000000",
}


@pytest.mark.parametrize("subject", SUBJECTS.values())
def test_the_page_for_consumers_names_every_subject(subject: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "consumers.md").read_text()
    _, _, kind, name, *_ = subject.split(".")
    (told,) = re.findall(rf"`of\.<run>\.{kind}\.(.*)`", page)
    assert kind in ("turn", "trajectory") or name in re.findall(r"[a-z]+", told.partition(">")[0])


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: type(fact).__name__)
def test_a_subject_ends_in_the_natural_key(fact: Fact) -> None:
    subject = fact.subject()
    assert subject == SUBJECTS[type(fact).__name__]
    assert subject.endswith("." + ".".join(str(part) for part in fact.key()))
    assert len(fact.key()) == fact.key_length == len(key_names(type(fact)))


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: type(fact).__name__)
def test_a_filter_with_part_of_the_key_finds_the_subject(fact: Fact) -> None:
    for length in range(fact.key_length + 1):
        for run in (fact.run, "*"):
            pattern = fact.filter_for(run, *fact.key()[:length]).replace(">", "*")
            assert fnmatch.fnmatchcase(fact.subject(), pattern)
    assert fact.filter_for(fact.run, *fact.key()) == fact.subject()


def test_no_two_facts_share_a_subject() -> None:
    patterns = [address(type(fact)) for fact in FACTS]
    assert len(set(patterns)) == len(patterns)
    assert len({fact.subject() for fact in FACTS}) == len(FACTS)
    assert DEAD_LETTER.subject_of_death() == "of.dead.verifier"


@pytest.mark.parametrize("name", ["a.b", "a b", "*", ">", "", "ü", "a" * 129, "a\r\nb"])
def test_a_name_that_is_no_token_is_refused_with_its_value(name: str) -> None:
    with pytest.raises(BadKey, match="A-Z"):
        RunPaused(run=name, generation=0).subject()
    with pytest.raises(BadKey, match="A-Z"):
        TurnRecorded.subject_for("r", name, 0, 0)
