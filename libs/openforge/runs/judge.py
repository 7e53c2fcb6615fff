"""The judge that a run file names."""

from openforge.endpoint import Address, BadEndpoint, Endpoint
from openforge.env.judge import EndpointJudge, Judge, JudgeFailed
from openforge.runs.config import JudgeSection


def judge_of(section: JudgeSection) -> Judge | None:
    """None where the run has no judge; raises `JudgeFailed` where its key is not there."""
    if not section.url:
        return None
    address = Address(section="judge", url=section.url, model=section.model, key_env=section.key_env)
    try:
        return EndpointJudge(Endpoint(address, at_once=section.at_once), max_tokens=section.max_tokens)
    except BadEndpoint as error:
        raise JudgeFailed(str(error)) from error
