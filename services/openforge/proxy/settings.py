"""Where the proxy runs, and how patient it is."""

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`proxy_url` and `sockets` are where it listens: on the URL's host and port and at `<sockets>/proxy.sock`.

    `engine_patience_s`: how long a call waits for an engine that does not answer before the harness sees an error.
    `engine_silence_s`: how long an engine may be silent within one answer.
    `proxy_grace_s`: how long a call goes on when its harness has gone, so that a repeat finds it.
    `proxy_keep_alive_s`: after how long a silence a stream gets a comment, so that nobody takes it for dead.
    `proxy_drain_s`: how long open calls may go on after SIGTERM. `proxy_body_mb`: the largest request.
    `proxy_replicas`: how many proxies work for the run; where it is more than one, each call costs one look at the bus,
    and they may share `proxy_url` and `sockets`.
    `proxy_client_s`: how long a client may take to send or to take a piece. `proxy_at_once`: how many requests of one
    attempt are served at once; more wait, unread.
    """

    run: str
    engine_url: str
    proxy_url: str
    sockets: str = ""
    engine_patience_s: float = 120.0
    engine_silence_s: float = 180.0
    proxy_grace_s: float = 15.0
    proxy_keep_alive_s: float = 15.0
    proxy_drain_s: float = 10.0
    proxy_body_mb: int = 32
    proxy_replicas: int = 1
    proxy_client_s: float = 120.0
    proxy_at_once: int = 64
