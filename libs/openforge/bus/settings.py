"""Where the bus is and what it keeps, read from the environment.

Promises: a wrong value is refused with the name of its variable, before anything is connected.
"""

import os
import ssl
from collections.abc import Mapping
from pathlib import Path

import msgspec

DEFAULT_URL = "nats://127.0.0.1:4222"
MEGABYTE = 1 << 20


class BadSettings(ValueError):
    """An environment variable holds what it cannot hold."""


class StreamLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Retention, the same for every stream of facts: 0 is no limit.

    `weights_max_bytes` bounds the store of weights: one that is full ends the learner that publishes there.

    `max_bytes` bounds each stream: a full one makes tellers wait, which pauses the run, and loses
    nothing. `max_age_s` forgets old facts, also those that no snapshot holds yet: leave it 0 unless runs are
    archived. `duplicate_window_s` costs memory for each message told within it.
    """

    max_bytes: int = 0
    weights_max_bytes: int = 0
    max_age_s: float = 0.0
    replicas: int = 1
    duplicate_window_s: float = 120.0


class BusSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`url` may list several servers of one cluster, separated by commas.

    Credentials: a `creds` file, an `nkey_seed_file`, or `user` with `password_file`. `blobs` says where large
    bytes lie: nothing for the bus's own object store, a folder, or `s3://bucket/prefix`. A server, or a stream, that is
    not there may come within `connect_timeout_s`.
    """

    url: str = DEFAULT_URL
    creds: str = ""
    nkey_seed_file: str = ""
    user: str = ""
    password_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    connect_timeout_s: float = 30.0
    blobs: str = ""
    streams: StreamLimits = StreamLimits()

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> "BusSettings":
        env = os.environ if env is None else env
        files = {
            field: _file(env, f"OPENFORGE_NATS_{field.upper()}")
            for field in ("creds", "nkey_seed_file", "password_file", "tls_ca", "tls_cert", "tls_key")
        }
        return cls(
            url=env.get("OPENFORGE_NATS_URL") or DEFAULT_URL,
            user=env.get("OPENFORGE_NATS_USER", ""),
            connect_timeout_s=_number(env, "OPENFORGE_NATS_CONNECT_TIMEOUT_S", 30.0),
            blobs=env.get("OPENFORGE_BLOBS", ""),
            streams=StreamLimits(
                max_bytes=int(_number(env, "OPENFORGE_STREAM_MAX_BYTES", 0)),
                weights_max_bytes=int(_number(env, "OPENFORGE_WEIGHTS_MAX_BYTES", 0)),
                max_age_s=_number(env, "OPENFORGE_STREAM_MAX_AGE_S", 0.0),
                replicas=int(_number(env, "OPENFORGE_STREAM_REPLICAS", 1)),
                duplicate_window_s=_number(env, "OPENFORGE_STREAM_DUPLICATE_WINDOW_S", 120.0),
            ),
            **files,
        )

    def servers(self) -> list[str]:
        return [url.strip() for url in self.url.split(",") if url.strip()]

    def password(self) -> str:
        return Path(self.password_file).read_text().strip() if self.password_file else ""

    def tls(self) -> ssl.SSLContext | None:
        """A context that trusts `tls_ca` (or the system) and shows `tls_cert`; None without TLS."""
        if not (self.tls_ca or self.tls_cert or any(url.startswith("tls://") for url in self.servers())):
            return None
        context = ssl.create_default_context(cafile=self.tls_ca or None)
        if self.tls_cert:
            context.load_cert_chain(self.tls_cert, self.tls_key or None)
        return context


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise BadSettings(f"{name} = {text!r} is no number: set a number, or unset it for {default:g}") from None
    if not 0 <= value < float("inf"):
        raise BadSettings(f"{name} = {text!r} is out of range: set 0 or more, or unset it for {default:g}")
    return value


def _file(env: Mapping[str, str], name: str) -> str:
    path = env.get(name, "")
    if path and not Path(path).is_file():
        raise BadSettings(f"{name} = {path!r} is no file: set the path of one that this process can read, or unset it")
    return path
