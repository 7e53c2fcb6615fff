"""When an answer ends, and what is said of it."""

from collections.abc import Sequence

from openforge.engine.stopping import Ended, StopRule


def _rule(stop: tuple[str, ...] = (), ids: frozenset[int] = frozenset(), longest: int = 99) -> StopRule:
    def decode(sampled: Sequence[int]) -> str:
        return bytes(sampled).decode(errors="replace")

    return StopRule(end_token_ids=frozenset({0}), stop_token_ids=ids, stop=stop, longest=longest, decode=decode)


def _first_end(rule: StopRule, answer: bytes) -> tuple[int, Ended | None]:
    for count in range(1, len(answer) + 1):
        if (ended := rule.ended(list(answer[:count]))) is not None:
            return count, ended
    return len(answer), None


def test_the_models_own_end_has_no_reason() -> None:
    assert _first_end(_rule(), b"ab\0cd") == (3, Ended("stop", None))


def test_a_stop_id_is_named() -> None:
    assert _first_end(_rule(ids=frozenset({99})), b"abcd") == (3, Ended("stop", 99))


def test_a_stop_string_ends_with_its_last_byte_however_it_is_cut_to_tokens() -> None:
    assert _first_end(_rule(stop=("```\n\n",)), b"```sh\nls\n```\n\nmore") == (14, Ended("stop", "```\n\n"))
    assert _first_end(_rule(stop=("é!",)), "caf\u00e9!".encode()) == (6, Ended("stop", "é!"))


def test_the_first_stop_string_to_be_complete_wins() -> None:
    assert _first_end(_rule(stop=("world", "lo")), b"hello world") == (5, Ended("stop", "lo"))


def test_the_longest_answer_ends_by_length_unless_it_stops_there() -> None:
    assert _first_end(_rule(longest=3), b"abcdef") == (3, Ended("length"))
    assert _first_end(_rule(longest=3), b"ab\0def") == (3, Ended("stop", None))
    assert _first_end(_rule(), b"abc") == (3, None)
