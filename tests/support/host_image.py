"""An image made from this host, without any registry: its programs, its Python, the packages of the tests.

Python is moved to /usr/local, where an official image has it. With its own packages there, an image of a service is
built on it without any index.
"""

import importlib.metadata
import io
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
ENV = (
    "PATH=/usr/local/bin:/usr/bin:/bin",
    "PIP_NO_INDEX=1",
    "PIP_NO_BUILD_ISOLATION=0",  # pip's own spelling of "without"
    "PIP_DISABLE_PIP_VERSION_CHECK=1",
    "PIP_ROOT_USER_ACTION=ignore",
)
_BUILDERS = ("pip", "hatchling")
_LARGE = 1 << 20
_PACKAGES = "site.getsitepackages()[-1].removeprefix(site.PREFIXES[0]).lstrip('/')"
_UNUSED = re.compile(r"torch/(include|share|test)/|torch/bin/(?!torch_shm)|pyarrow/include/|/tests/|\.a$|\.pyi$")


def packages_of(extras: Sequence[str]) -> Iterator[importlib.metadata.Distribution]:
    """What these extras of openforge need, and what builds its wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    told: dict[str, list[str]] = project["optional-dependencies"]
    wanted = [Requirement(text) for text in (*_BUILDERS, *project["dependencies"])]
    wanted += [Requirement(text) for extra in extras for text in told[extra]]
    seen: set[tuple[str, str]] = set()
    given: set[str] = set()
    while wanted:
        need = wanted.pop()
        name = canonicalize_name(need.name)
        for extra in ("", *need.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            if name == "openforge":
                wanted += [Requirement(text) for text in told.get(extra, ())]
                continue
            found = importlib.metadata.distribution(name)
            wanted += [more for more in map(Requirement, found.requires or ()) if _applies(more, extra)]
            if name not in given:
                given.add(name)
                yield found


def _applies(need: Requirement, extra: str) -> bool:
    return need.marker is None or need.marker.evaluate({"extra": extra})


def image_tree(programs: Sequence[Path], extras: Sequence[str], more: Mapping[str, Path]) -> Iterator[bytes]:
    """A tar of a root file system, piece by piece; `more` are files of this host by their paths inside."""
    reading, writing = os.pipe()
    with ThreadPoolExecutor(1) as pool, os.fdopen(reading, "rb") as pieces:
        written = pool.submit(_write, writing, programs, extras, more)
        while piece := pieces.read(_LARGE):
            yield piece
        written.result()


def _write(pipe: int, programs: Sequence[Path], extras: Sequence[str], more: Mapping[str, Path]) -> None:
    with os.fdopen(pipe, "wb") as out, tarfile.open(fileobj=out, mode="w|", bufsize=_LARGE) as tar:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        interpreter = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
        files = _files(interpreter, version, extras) | {Path(inside): file for inside, file in more.items()}
        compiled = [file for file in files.values() if ".so" in file.name and file.stat().st_size > _LARGE]
        compiled += [file for path, file in files.items() if "lib-dynload" in path.parts]
        _skeleton(tar)
        _link(tar, "usr/local/bin/python3", version)
        _link(tar, "usr/local/bin/python", version)
        for path in _with_libraries([*programs, interpreter, *compiled], set(files.values())):
            _add(tar, _place(path), path)
        for inside, file in files.items():
            _add(tar, str(inside), file)


def _files(interpreter: Path, version: str, extras: Sequence[str]) -> dict[Path, Path]:
    """Python and the packages, by their paths inside."""
    library = _said(interpreter, "import sysconfig; print(sysconfig.get_path('stdlib'))")
    packages = _said(interpreter, f"import site; print({_PACKAGES})")
    files = dict(_package_files(extras, Path("usr/local") / packages))
    files |= {Path("usr/local/lib") / version / path: file for path, file in _library_files(Path(library))}
    return files | {Path("usr/local/bin") / version: interpreter}


def _said(interpreter: Path, script: str) -> str:
    done = subprocess.run([interpreter, "-I", "-c", script], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _library_files(library: Path) -> Iterator[tuple[Path, Path]]:
    for file in library.rglob("*"):
        inside = file.relative_to(library)
        if file.is_file() and not {"site-packages", "dist-packages", "test", "EXTERNALLY-MANAGED"} & set(inside.parts):
            yield inside, file


def _package_files(extras: Sequence[str], packages: Path) -> Iterator[tuple[Path, Path]]:
    for distribution in packages_of(extras):
        for entry in distribution.files or ():
            file = Path(str(distribution.locate_file(entry)))
            if ".." not in entry.parts and not _UNUSED.search(str(entry)) and file.is_file():
                yield packages / entry, file


def _place(path: Path) -> str:
    """Where this host has it; a library of an interpreter in somebody's home goes where the loader looks."""
    if path.parts[1] in ("lib", "lib64"):
        return f"usr{path}"
    return str(path)[1:] if path.parts[1] == "usr" else f"usr/lib/{path.name}"


def _with_libraries(programs: Sequence[Path], packaged: set[Path]) -> Iterator[Path]:
    """The programs that are this host's, and the libraries of all that are in no package."""
    listed = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=False).stdout
    named = {word for word in listed.split() if word.startswith("/") and not word.endswith(":")}
    libraries = {Path(os.path.normpath(name)) for name in named}
    own = {path for path in programs if path.is_relative_to("/usr/bin") or path.is_relative_to("/usr/sbin")}
    yield from sorted(own | (libraries - packaged))


def _skeleton(tar: tarfile.TarFile) -> None:
    for link in ("bin", "sbin", "lib", "lib64"):
        _link(tar, link, f"usr/{link}")
    for folder in ("usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "tmp", "proc", "sys", "dev", "run", "root", "var"):
        info = tarfile.TarInfo(folder)
        info.type, info.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
        tar.addfile(info)
    for name, text in {"etc/passwd": "root:x:0:0:root:/:/bin/sh\n", "etc/group": "root:x:0:\n"}.items():
        info = tarfile.TarInfo(name)
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text.encode()))


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    tar.addfile(info)


def _add(tar: tarfile.TarFile, name: str, file: Path) -> None:
    """With its time, by which compiled modules know their source; for everybody to read."""
    resolved = file.resolve()
    info = tarfile.TarInfo(name)
    status = resolved.stat()
    info.size, info.mtime = status.st_size, int(status.st_mtime)
    info.mode = 0o755 if status.st_mode & 0o100 else 0o644
    with resolved.open("rb") as content:
        tar.addfile(info, content)
