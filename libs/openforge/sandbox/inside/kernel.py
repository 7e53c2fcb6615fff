"""Calls of the kernel that no C module of Python offers."""

import _ctypes
import posix
import sys

PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
PR_CAPBSET_DROP = 24
_CHUNK = 1 << 16


def prctl(option: int, value: int) -> None:
    address = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")  # type: ignore[arg-type]
    _ctypes.call_function(address, (option, value, 0, 0, 0))


class Text(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "z"


class Pointer(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "P"


def filter_calls(path: str) -> None:
    """Deny from now on what the BPF program in that file denies, to this process and all it starts.

    `struct sock_fprog` is the number of 8-byte steps and where they are.
    """
    fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    steps = posix.read(fd, _CHUNK)
    posix.close(fd)
    held = Text(steps)
    place = Pointer.from_address(_ctypes.addressof(held)).value
    program = (len(steps) // 8).to_bytes(8, sys.byteorder) + place.to_bytes(8, sys.byteorder)
    address = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")  # type: ignore[arg-type]
    if _ctypes.call_function(address, (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, Text(program), 0, 0)):
        raise OSError("the system call filter was refused")
