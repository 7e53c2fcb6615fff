"""Why things ended. Every member says in one sentence what happened; `policy_can_cause` says who can.

What the policy can cause is trained with its verdict, whatever happened. What it cannot cause is
infrastructure: never a reward, the same slot gets a new attempt, and it is counted.
"""

from enum import StrEnum


class EndReason(StrEnum):
    """How an attempt of an episode ended."""

    FINISHED = "finished"
    """The agent ended by itself and said that it was done."""
    GAVE_UP = "gave_up"
    """The agent ended by itself without saying that it was done."""
    OUT_OF_TURNS = "out_of_turns"
    """The agent used all the turns that its limits allow."""
    OUT_OF_TIME = "out_of_time"
    """The agent was still working at its deadline."""
    OUT_OF_CONTEXT = "out_of_context"
    """The conversation no longer fitted the model's window."""
    OUT_OF_MEMORY = "out_of_memory"
    """The sandbox's own memory or process limit ended the agent's work."""
    AGENT_CRASHED = "agent_crashed"
    """The harness ended with an error that its own conversation led to."""
    SANDBOX_FAILED = "sandbox_failed"
    """The sandbox could not be made, or was lost."""
    HOST_LOST = "host_lost"
    """The manager or the env host that ran the attempt died."""
    ENGINE_FAILED = "engine_failed"
    """A model call failed for a reason of ours, so the agent saw an error that no policy caused."""
    HARNESS_BROKEN = "harness_broken"
    """The harness did not start, or ended by itself before a model call of it was answered."""
    CANCELLED = "cancelled"
    """The run was stopped, or the scheduler withdrew the attempt."""

    @property
    def policy_can_cause(self) -> bool:
        return self not in _INFRASTRUCTURE


_INFRASTRUCTURE = frozenset(
    {
        EndReason.SANDBOX_FAILED,
        EndReason.HOST_LOST,
        EndReason.ENGINE_FAILED,
        EndReason.HARNESS_BROKEN,
        EndReason.CANCELLED,
    }
)


class FailReason(StrEnum):
    """Why an attempt has no verdict. None of these can be caused by the policy."""

    SANDBOX_FAILED = "sandbox_failed"
    """The sandbox could not be made, or was lost."""
    HOST_LOST = "host_lost"
    """The manager or the env host that ran the attempt died."""
    ENGINE_FAILED = "engine_failed"
    """A model call failed for a reason of ours, or none was answered before the attempt ended."""
    HARNESS_BROKEN = "harness_broken"
    """The harness did not start, or ended without a model call that the proxy took."""
    CANCELLED = "cancelled"
    """The run was stopped, or the attempt was withdrawn."""
    VERIFIER_FAILED = "verifier_failed"
    """The checks crashed, hung or printed no valid reward, and would do so on the reference too."""
    JUDGE_FAILED = "judge_failed"
    """A judge could not be reached, or its answer could not be read."""
    RECORD_BROKEN = "record_broken"
    """The sealed turns cannot be merged: a recorded turn is missing or contradicts another."""
    UNTRUSTED_CLAIM = "untrusted_claim"
    """Only the environment itself says what the reward is, and the run does not trust it."""


class RetireReason(StrEnum):
    """Why a verified trajectory is not trained. Retirement takes the whole group."""

    STALE = "stale"
    """Its oldest sampled token lags more than `max_lag` behind."""
    TIMED_OUT = "timed_out"
    """Its group kept a batch waiting longer than the run allows."""
    TOO_FEW = "too_few"
    """Fewer than two members of its group have a verdict, so there is nothing to compare."""
    ZERO_VARIANCE = "zero_variance"
    """All members of its group earned the same reward and `dynamic_sampling` refills such groups."""
    TOO_LONG = "too_long"
    """A sequence is longer than the learner's row."""
    INVALID = "invalid"
    """It carries numbers no engine may send, such as a log-prob sentinel."""
    LOST = "lost"
    """Something beside its tokens that its training needs is gone from the blobs."""
    NOT_NEEDED = "not_needed"
    """The run ended before a batch could take it."""


class StopReason(StrEnum):
    """Why a run stopped."""

    COMPLETED = "completed"
    """It trained all its steps."""
    INTERRUPTED = "interrupted"
    """Somebody stopped it; the same command resumes it."""
    NO_PROGRESS = "no_progress"
    """Nothing moved for longer than the run file allows."""
    FAILED = "failed"
    """A service gave up."""


class BranchCause(StrEnum):
    """Why a turn did not continue an earlier one token by token."""

    START = "start"
    """It is the first turn of the attempt."""
    CONTINUED = "continued"
    """It did continue its parent."""
    REWRITTEN = "rewritten"
    """The harness changed earlier messages."""
    TEMPLATE = "template"
    """The messages continue the parent, but the template cannot be continued token by token."""
    TOOLS_CHANGED = "tools_changed"
    """The tool list changed, which changes the head of the prompt."""
    COMPACTION = "compaction"
    """The harness replaced its history with a summary."""
    REASONING_DROPPED = "reasoning_dropped"
    """The harness sent back its history without the reasoning that was sampled."""
    SIDE_CALL = "side_call"
    """A call beside the conversation, such as a title or a summary."""
    SUB_AGENT = "sub_agent"
    """Another agent of the same attempt began."""
    RESAMPLED = "resampled"
    """The harness asked the same question again after it had an answer."""
    TRANSIENT = "transient"
    """The message that stood last in an earlier call is gone; some harnesses add one for a single call."""
    UNKNOWN = "unknown"
    """Another call went on from the same turn, and nothing that the harness says or sends explains this one."""


class Caller(StrEnum):
    """Which of the harness's conversations a turn belongs to."""

    MAIN = "main"
    """The agent's own conversation."""
    SUB_AGENT = "sub_agent"
    """An agent that the agent started."""
    SIDE_CALL = "side_call"
    """A call beside the conversations, such as a title or a summary."""


class TurnStatus(StrEnum):
    """What became of the answer of a turn."""

    DELIVERED = "delivered"
    """The harness read it to its end, as far as a server can know."""
    ABANDONED = "abandoned"
    """The harness went away before its end and did not ask again."""
    ABORTED = "aborted"
    """The attempt ended while it was being sampled."""


class FinishReason(StrEnum):
    """Why sampling of a turn ended."""

    STOP = "stop"
    """A stop token or stop string was sampled."""
    LENGTH = "length"
    """The token limit of the turn or of the window was reached."""
    ABORT = "abort"
    """Sampling was called off."""
