"""The system calls that a sandbox's processes may not make, as a classic BPF program.

Promises: what is denied fails with an error the caller can read (nothing is killed by it); on a machine
whose numbers we do not know there is no program, and `filter_program` says so by returning None.

Denied is what reaches the kernel's inner parts and no agent needs: tracing, mounting, namespaces, kernel
modules, keys, BPF, performance events, io_uring, and sockets of families that a network namespace does
not hold (a virtual machine's vsock above all).
"""

import errno
import platform
import struct
from collections.abc import Mapping

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCH_AT, _ARGUMENT_0_AT = 0, 4, 16
_X32_BIT = 0x40000000
_CLONE_NEW_ANY = 0x7E020000 | 0x00000080  # mount, cgroup, uts, ipc, user, pid, net; time
_FAMILIES = (1, 2, 10, 16)  # UNIX, INET, INET6, NETLINK

_X86_64: Mapping[str, int] = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
    "mount": 165, "umount2": 166, "pivot_root": 155, "swapon": 167, "swapoff": 168,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "mount_setattr": 442,
    "unshare": 272, "setns": 308, "keyctl": 250, "add_key": 248, "request_key": 249, "bpf": 321,
    "perf_event_open": 298, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176,
    "open_by_handle_at": 304, "name_to_handle_at": 303, "userfaultfd": 323, "reboot": 169, "syslog": 103,
    "acct": 163, "quotactl": 179, "settimeofday": 164, "clock_settime": 227, "iopl": 172, "ioperm": 173,
    "pidfd_getfd": 438, "fanotify_init": 300, "lookup_dcookie": 212, "vhangup": 153,
}  # fmt: skip
_AARCH64: Mapping[str, int] = {
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
    "mount": 40, "umount2": 39, "pivot_root": 41, "swapon": 224, "swapoff": 225,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "mount_setattr": 442,
    "unshare": 97, "setns": 268, "keyctl": 219, "add_key": 217, "request_key": 218, "bpf": 280,
    "perf_event_open": 241, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "kexec_load": 104, "kexec_file_load": 294, "init_module": 105, "finit_module": 273, "delete_module": 106,
    "open_by_handle_at": 265, "name_to_handle_at": 264, "userfaultfd": 282, "reboot": 142, "syslog": 116,
    "acct": 89, "quotactl": 60, "settimeofday": 170, "clock_settime": 112,
    "pidfd_getfd": 438, "fanotify_init": 262, "lookup_dcookie": 18, "vhangup": 58,
}  # fmt: skip


class _Machine:
    def __init__(self, audit_arch: int, denied: Mapping[str, int], clone: int, socket: int, socketpair: int) -> None:
        self.audit_arch = audit_arch
        self.denied = denied
        self.clone = clone
        self.socket = socket
        self.socketpair = socketpair


_CLONE3 = 435
_MACHINES = {
    "x86_64": _Machine(0xC000003E, _X86_64, clone=56, socket=41, socketpair=53),
    "aarch64": _Machine(0xC00000B7, _AARCH64, clone=220, socket=198, socketpair=199),
}


def filter_program(machine: str = "") -> bytes | None:
    """The program as `struct sock_filter[]`, ready for `bwrap --seccomp`; None for an unknown machine."""
    known = _MACHINES.get(machine or platform.machine())
    return _program(known) if known else None


def _program(machine: _Machine) -> bytes:
    """Blocks of "is it this call? then this answer", each jumping to the next block, then allow."""
    deny, unknown = _answer(errno.EPERM), _answer(errno.ENOSYS)
    code = [
        _step(_LOAD, _ARCH_AT),
        _step(_JUMP_EQUAL, machine.audit_arch, 1, 0),
        unknown,
        _step(_LOAD, _NUMBER_AT),
        _step(_JUMP_AT_LEAST, _X32_BIT, 0, 1),
        unknown,
        _step(_JUMP_EQUAL, _CLONE3, 0, 1),  # its flags lie in memory, out of sight: libc falls back to clone
        unknown,
    ]
    for number in sorted(machine.denied.values()):
        code += [_step(_JUMP_EQUAL, number, 0, 1), deny]
    code += [
        _step(_JUMP_EQUAL, machine.clone, 0, 3),
        _step(_LOAD, _ARGUMENT_0_AT),
        _step(_JUMP_ANY_BIT, _CLONE_NEW_ANY & ~0xFF, 0, 1),  # the low byte of clone's flags is a signal
        deny,
        _step(_LOAD, _NUMBER_AT),
        _step(_JUMP_EQUAL, machine.socket, 1, 0),
        _step(_JUMP_EQUAL, machine.socketpair, 0, len(_FAMILIES) + 2),
        _step(_LOAD, _ARGUMENT_0_AT),
    ]
    for left, family in zip(range(len(_FAMILIES), 0, -1), _FAMILIES, strict=True):
        code.append(_step(_JUMP_EQUAL, family, left, 0))
    code += [_answer(errno.EAFNOSUPPORT), _step(_RETURN, _ALLOW)]
    return b"".join(code)


def _answer(error: int) -> bytes:
    return _step(_RETURN, _ERRNO | error)


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)
