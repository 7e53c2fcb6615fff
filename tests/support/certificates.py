"""A throw-away authority and certificates signed by it, made by the `openssl` program."""

import subprocess
from pathlib import Path
from typing import NamedTuple


class Certificates(NamedTuple):
    ca: str
    cert: str
    key: str


def make_certificates(folder: Path) -> Certificates:
    """One pair for 127.0.0.1 and localhost that serves servers and clients."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    authority = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign")
    openssl(
        "req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test", *authority
    )
    openssl("req", *new_key, "-keyout", "peer.key", "-out", "peer.csr", "-subj", "/CN=peer")
    (folder / "names.txt").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names.txt")
    openssl("x509", "-req", "-in", "peer.csr", "-out", "peer.pem", *signing)
    return Certificates(str(folder / "ca.pem"), str(folder / "peer.pem"), str(folder / "peer.key"))
