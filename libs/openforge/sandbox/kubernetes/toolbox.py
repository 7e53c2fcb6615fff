"""`python -m openforge.sandbox.kubernetes.toolbox FOLDER`: what the toolbox image of driver `kubernetes` holds.

Promises: the folder holds everything that our init needs in a pod of any image for this machine's architecture. The
image is any small one with `/bin/sh`, `cp` and `mkdir`, and this folder at `/openforge/runtime`.
"""

import sys
from pathlib import Path

from openforge.sandbox.process import host


def write_toolbox(folder: Path) -> None:
    """`folder` is made."""
    host.write_runtime(folder, complete=True)
    library = next((folder / "lib").glob("python3.*"))
    host.compile_module(Path(__file__).with_name("inside.py"), folder / "inside.pyc")
    loader = next(path for path in (folder / "lib").iterdir() if path.name.startswith(("ld-linux", "ld-musl")))
    (folder / "lib" / "loader").symlink_to(loader.name)
    (folder / "bin" / "python").symlink_to(library.name)


if __name__ == "__main__":
    write_toolbox(Path(sys.argv[1]))
