"""What a sandbox sees of the host: programs read-only, a few generated files, and nothing else.

Promises: no home folder, no secret and no state of the host is among it; the interpreter of our init is a
copy, so that it works wherever the host keeps its own.
"""

import importlib.util
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

from openforge.sandbox.inside import init

_ETC = (
    "debian_version",
    "ld.so.cache",
    "localtime",
    "mime.types",
    "os-release",
    "protocols",
    "python3/debian_config",
    "services",
    "ssl/certs/ca-certificates.crt",
    "ssl/openssl.cnf",
    "pki/tls/certs/ca-bundle.crt",
    "timezone",
)
_GENERATED = {
    "passwd": "root:x:0:0:root:/:/bin/sh\nagent:x:1000:1000:agent:/workspace:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "resolv.conf": "",
    "profile": "",
    "bash.bashrc": "",
}
_PROGRAM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_INIT_MODULES = ("_ctypes", "_socket", "select", "resource", "fcntl", "encodings.utf_8", "encodings.aliases")
INIT_FOLDER = "/run/openforge"


def program_folders() -> list[str]:
    """bwrap arguments that show the host's programs."""
    arguments: list[str] = []
    for name in _PROGRAM_FOLDERS:
        folder = Path(name)
        if folder.is_symlink():
            arguments += ["--symlink", str(folder.readlink()), name]
        elif folder.is_dir():
            arguments += ["--ro-bind", name, name]
    return arguments


def write_etc(folder: Path) -> None:
    """A small `/etc`: what programs need to start, and users that mean nothing on the host."""
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    for name in _ETC:
        source = Path("/etc") / name
        if source.is_file() and source.stat().st_mode & 0o004:
            _write_readable(folder / name, source.read_bytes())
    for name, text in _GENERATED.items():
        _write_readable(folder / name, text.encode())
    _copy_links(Path("/etc/alternatives"), folder / "alternatives")


def _write_readable(place: Path, data: bytes) -> None:
    """Readable by everybody, whatever the mask of this process."""
    for parent in reversed(place.parents):
        if not parent.exists():
            parent.mkdir()
            parent.chmod(0o755)
    place.write_bytes(data)
    place.chmod(0o644)


def _copy_links(source: Path, target: Path) -> None:
    """Debian's choice of programs: `awk` and the like are links by way of this folder."""
    target.mkdir(mode=0o755)
    for link in source.iterdir() if source.is_dir() else ():
        if link.is_symlink():
            (target / link.name).symlink_to(link.readlink())


def copy_wheel(packages: Path, name: str, target: Path) -> None:
    """A wheel's package and the libraries bundled beside it, for everybody to read and run."""
    target.mkdir(mode=0o755)
    for part in (name, f"{name}.libs"):
        if (packages / part).is_dir():
            shutil.copytree(packages / part, target / part)
    for entry in (target, *target.rglob("*")):
        entry.chmod(0o755)


def write_runtime(folder: Path, *, complete: bool = False) -> list[str]:
    """Our init, compiled, with the little of an interpreter that it needs; its command line inside.

    `complete`: with the C library and its loader too, for file trees that are not this host's.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = folder / "lib" / version
    for made in (folder, folder / "bin", folder / "lib", library, library / "encodings", library / "lib-dynload"):
        made.mkdir()
        made.chmod(0o755)
    interpreter = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    shutil.copyfile(interpreter, folder / "bin" / version)
    (folder / "bin" / version).chmod(0o755)
    shown = () if complete else _SHOWN
    for shared in _shared_objects(interpreter, shown):
        place = library / "lib-dynload" if "lib-dynload" in shared.parts else folder / "lib"
        shutil.copyfile(shared, place / shared.name)
        (place / shared.name).chmod(0o755)
    _copy_modules(library)
    _copy_inside(library / "openforge" / "sandbox" / "inside")
    compile_module(Path(init.__file__), folder / "init.pyc")
    loader = _loader(folder / "lib") if complete else []
    return [*loader, f"{INIT_FOLDER}/bin/{version}", "-I", "-S", f"{INIT_FOLDER}/init.pyc"]


def _loader(libraries: Path) -> list[str]:
    """The start of a command line that uses these libraries alone; each answers to its shorter names too."""
    for library in list(libraries.glob("*.so.*")):
        name = library.name
        while not (name := name.rpartition(".")[0]).endswith(".so"):
            if not (libraries / name).exists():
                (libraries / name).symlink_to(library.name)
    (program,) = (path.name for path in libraries.iterdir() if path.name.startswith(("ld-linux", "ld-musl")))
    inside = f"{INIT_FOLDER}/lib"
    return [f"{inside}/{program}", "--library-path", inside]


def _shared_objects(interpreter: Path, shown: tuple[str, ...]) -> list[Path]:
    """Every shared library that the init maps and that does not lie below one of the folders `shown`."""
    script = f"import {', '.join(_INIT_MODULES)}\nprint(open('/proc/self/maps').read())"
    maps = subprocess.run([interpreter, "-I", "-S", "-c", script], check=True, capture_output=True, text=True).stdout
    mapped = {line.split(maxsplit=5)[5] for line in maps.splitlines() if ".so" in line}
    return [Path(name) for name in sorted(mapped) if "lib-dynload" in name or not name.startswith(shown)]


_SHOWN = tuple(f"{folder}/" for folder in _PROGRAM_FOLDERS)


def _copy_modules(library: Path) -> None:
    for name in ("encodings", "encodings.utf_8", "encodings.aliases"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        target = "__init__" if name == "encodings" else name.rpartition(".")[2]
        compile_module(Path(spec.origin), library / "encodings" / f"{target}.pyc")
    _write_readable(library / "os.py", b"")  # the landmark by which the interpreter finds its library


def _copy_inside(package: Path) -> None:
    """With an `__init__` in each folder: a package without one is looked for in every folder of the path."""
    package.mkdir(parents=True)
    for made in (package, *package.parents[:2]):
        made.chmod(0o755)
        compile_module(Path(init.__file__).with_name("__init__.py"), made / "__init__.pyc")
    for source in Path(init.__file__).parent.glob("*.py"):
        compile_module(source, package / f"{source.stem}.pyc")


def compile_module(source: Path, target: Path) -> None:
    """As unchecked bytecode: nothing looks for the source at start."""
    py_compile.compile(
        str(source),
        cfile=str(target),
        dfile=source.name,
        doraise=True,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    target.chmod(0o644)
