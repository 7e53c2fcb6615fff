"""The policy's lineage: what was trained on what, published and served.

The learner tells `BatchTrained`, `TrajectoryRetired` and `PolicyPublished` on one stream, in the order
in which it did them: that stream is its log. Engines say there what they serve and how busy they are.
"""

from typing import ClassVar

import msgspec

from openforge.protos.fact import Fact
from openforge.protos.reasons import RetireReason


class LagCount(msgspec.Struct, frozen=True, array_like=True):
    """`tokens` loss tokens were `lag` versions old when they were trained."""

    lag: int
    tokens: int


class BatchTrained(Fact, frozen=True, kw_only=True, tag=True):
    """Batch `base` -> `version` = `base` + 1 is committed: computed at `base` on `episodes`, in that order.

    `lag` is `base` minus the oldest version over the unmasked loss tokens.
    """

    kind: ClassVar[str] = "policy"
    name: ClassVar[str] = "trained"

    version: int
    base: int
    episodes: tuple[str, ...]
    groups: tuple[str, ...]
    config_digest: str
    lag: int
    lags: tuple[LagCount, ...] = ()
    loss_tokens: int = 0
    masked_tokens: int = 0
    trained_tokens: int = 0
    reward_mean: float = 0.0
    metrics: dict[str, float] = {}
    step_s: float = 0.0
    learner: str = ""

    def key(self) -> tuple[str | int, ...]:
        return (self.version,)


class TrajectoryRetired(Fact, frozen=True, kw_only=True, tag=True):
    """A verified trajectory will never be trained. Retirement takes the whole group."""

    kind: ClassVar[str] = "policy"
    name: ClassVar[str] = "retired"

    episode: str
    group: str
    reason: RetireReason
    version: int
    lag: int = 0
    sampled_tokens: int = 0
    detail: str = ""

    def key(self) -> tuple[str | int, ...]:
        return (self.episode,)


class PolicyPublished(Fact, frozen=True, kw_only=True, tag=True):
    """Weights of `version` can be loaded from `location`, a folder with a hashed manifest.

    `digest` is the manifest's sha256. A learner that had to compute a version again publishes it
    with the next `incarnation`; an engine reloads if the digest differs from what it serves. Where `stream` is not
    empty it is the HOST:PORT at which the learner also broadcasts them.
    """

    kind: ClassVar[str] = "policy"
    name: ClassVar[str] = "published"
    key_length: ClassVar[int] = 2

    version: int
    incarnation: int
    location: str
    digest: str
    bytes: int = 0
    stream: str = ""

    def key(self) -> tuple[str | int, ...]:
        return (self.version, self.incarnation)


class PolicyServed(Fact, frozen=True, kw_only=True, tag=True):
    """Engine process `engine` answers with `version` from now on.

    `probe_error` is the largest absolute log-prob difference to the manifest's probe. Of the `load_s` that it took,
    `check_s` went into reading and hashing the files, `carry_s` into bringing them into the model, `probe_s` into
    the probe. `digest` is `endpoint` where the model is somebody else's: it has no version and was not probed.
    """

    kind: ClassVar[str] = "policy"
    name: ClassVar[str] = "served"
    key_length: ClassVar[int] = 3

    version: int
    incarnation: int
    engine: str
    digest: str
    probe_error: float
    load_s: float = 0.0
    check_s: float = 0.0
    carry_s: float = 0.0
    probe_s: float = 0.0

    def key(self) -> tuple[str | int, ...]:
        return (self.version, self.incarnation, self.engine)


class EngineMeasured(Fact, frozen=True, kw_only=True, tag=True):
    """What engine process `engine` had to do in the seconds before Unix time `at_s`, in the mean of several looks.

    `running` requests were computed and `waiting` ones were not yet; the running ones held `kv_use` of the memory for
    keys and values.
    """

    kind: ClassVar[str] = "policy"
    name: ClassVar[str] = "measured"
    key_length: ClassVar[int] = 2

    engine: str
    at_s: int
    running: float
    waiting: float
    kv_use: float

    def key(self) -> tuple[str | int, ...]:
        return (self.engine, self.at_s)
