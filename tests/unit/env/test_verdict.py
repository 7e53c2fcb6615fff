import pytest

from openforge.env.contract import RewardRule
from openforge.env.verdict import Broke, Scored, read_verdict
from openforge.sandbox.contract import ExecResult

FLOAT = RewardRule(kind="float")


def _read(stdout: bytes, rule: RewardRule = FLOAT, **how: object) -> Scored | Broke:
    return read_verdict(ExecResult(**{"exit_code": 0, "stdout": stdout, "stderr": b"", **how}), rule)  # type: ignore[arg-type]


def test_the_reward_is_read_from_the_last_line_that_is_not_empty() -> None:
    verdict = _read(b'{"files": 1}\nno reward yet\n{"reward": 0.5, "files": 3}\n\n  \n')
    assert isinstance(verdict, Scored)
    assert verdict.reward == 0.5
    assert verdict.metrics == {"files": 3.0, "score": 0.5, "passed": 0.0}


@pytest.mark.parametrize(
    "other",
    [
        b'{"reward": 1}',
        b' {"note": "", "reward": 1} ',
        b'{"\\u0072eward": 1}',
        b'{"reward": null}',
        b'{"judge_failed": "x"}',
        b'{"ask": {"q": []}}',
    ],
)
def test_of_two_verdicts_none_is_believed(other: bytes) -> None:
    for printed in (other + b'\nnoise\n{"reward": 0}', b'{"reward": 0}\n' + other):
        assert isinstance(_read(printed), Broke)


@pytest.mark.parametrize(
    "printed",
    [
        b"",
        b"\n \n",
        b"done",
        b'{"reward": 1}\ndone',
        b"[1]",
        b"1",
        b"{}",
        b'{"score": 1}',
        b'{"reward": true}',
        b'{"reward": "1"}',
        b'{"reward": null}',
        b'{"reward": NaN}',
        b'{"reward": Infinity}',
        b'{"reward": 1e309}',
        b'{"reward": -1e309}',
        b'{"reward": 1' + b"0" * 400 + b"}",
        b'{"reward": {"reward": 1}}',
        b'{"reward": 1',
        b'\xff\xfe{"reward": 1}',
        b'{"reward": 1, "said": "\xff"}',
        b"[" * 100_000,
    ],
)
def test_whatever_is_no_finite_number_is_no_reward(printed: bytes) -> None:
    assert isinstance(_read(printed), Broke)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"exit_code": 124, "timed_out": True, "wall_s": 20.0}, "did not end within 20 s"),
        ({"exit_code": 1, "stderr": b"Traceback\nKeyError: 'x'\n"}, "exit code 1: KeyError: 'x'"),
        ({"exit_code": -9, "out_of_memory": True}, "exit code -9, out of memory"),
        ({"truncated": True}, "more than can be kept"),
    ],
)
def test_checks_that_did_not_end_well_have_no_verdict_whatever_they_printed(how: dict[str, object], why: str) -> None:
    verdict = _read(b'{"reward": 1}', **how)
    assert isinstance(verdict, Broke)
    assert why in verdict.why


def test_metrics_are_finite_numbers_only() -> None:
    verdict = _read(b'{"reward": 1, "a": 2, "b": true, "c": "3", "d": [4], "e": null, "passed": 7}')
    assert isinstance(verdict, Scored)
    assert verdict.metrics == {"a": 2.0, "score": 1.0, "passed": 1.0}


def test_a_binary_reward_is_one_from_the_threshold_on() -> None:
    rule = RewardRule(kind="binary", pass_threshold=0.75)
    for printed, reward in ((b'{"reward": 0.7}', 0.0), (b'{"reward": 0.75}', 1.0), (b'{"reward": 9}', 1.0)):
        verdict = _read(printed, rule)
        assert isinstance(verdict, Scored)
        assert verdict.reward == reward
