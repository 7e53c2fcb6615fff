"""Driver `docker`: sandboxes as containers of this host's Docker or Podman, made from images."""

from openforge.sandbox.docker.driver import DockerDriver

__all__ = ["DockerDriver"]
