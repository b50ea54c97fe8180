"""Run a program that can't reach the network, read other processes, or write files outside one folder (Linux).

`KernelProcess` runs this file as a script, before anything of the kernel: isolation applies to one thread and what
it starts, and can't be undone. So it imports the standard library alone, and Python ignores the environment (``-I``).
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["MEASURES", "isolate", "unreadable"]

MEASURES = {
    "network": "use the network or local sockets",
    "processes": "read other processes",
    "files": "write outside its temporary folder",
}
"""What an isolated process can't do, by the name of the measure."""

_PR_GET_DUMPABLE, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 3, 4, 22, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
_SECCOMP_MODE_FILTER = 2
_CAP_DAC_OVERRIDE = 1

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@contextmanager
def unreadable() -> Iterator[None]:
    """Keep other processes of the user from reading this one's environment and memory while the block runs (Linux)."""
    if _LIBC is None:
        yield
        return
    before = _LIBC.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    try:
        yield
    finally:
        _LIBC.prctl(_PR_SET_DUMPABLE, before, 0, 0, 0)


def isolate(folder: str) -> list[str]:
    """Isolate this thread, which may then write below `folder`; return the names of the `MEASURES` in force."""
    if _LIBC is None or _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return []
    _drop_capabilities(_LIBC)
    restricted = _restrict(_LIBC, folder)
    return [*(["network"] if _filter(_LIBC) else []), *restricted]


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Give up what root may do, except to read files of others: a process with capabilities reads any other one."""
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for number in range(64):
        if number != _CAP_DAC_OVERRIDE:
            libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    version, kept = 0x20080522, (1 << _CAP_DAC_OVERRIDE if os.geteuid() == 0 else 0)
    for capabilities in (kept, 0):  # a container may not have given even that one
        sets = struct.pack("6I", capabilities, capabilities, 0, 0, 0, 0)
        if not libc.capset(struct.pack("Ii", version, 0), sets):
            return


# Rights of Landlock by the version of its interface that introduced them; those to read are not restricted.
_WRITE_FILE, _TRUNCATE, _REFER = 1 << 1, 1 << 14, 1 << 13
_MAKE_AND_REMOVE = 0b1_1111_1111 << 4
_SHM = "/dev/shm"  # noqa: S108 - where the locks of multiprocessing are
_SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 444, 445, 446


def _restrict(libc: ctypes.CDLL, folder: str) -> list[str]:
    """Restrict this thread by Landlock: no access to processes outside, and no writing outside some folders."""
    abi = libc.syscall(_SYS_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return []
    to_files = _WRITE_FILE | (_TRUNCATE if abi >= 3 else 0)
    rights = to_files | _MAKE_AND_REMOVE | (_REFER if abi >= 2 else 0)
    # Handled but never allowed: binding and connecting (1, 2); abstract sockets and signals of processes outside.
    attributes = struct.pack("3Q", rights, 0b11, 0b11)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = libc.syscall(_SYS_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return []
    try:
        devices = [entry.path for entry in os.scandir("/dev") if _is_for_all(entry)]
        for path, right in [(folder, rights), (_SHM, rights), *((device, to_files) for device in devices)]:
            try:
                opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            libc.syscall(_SYS_ADD_RULE, rules, 1, struct.pack("=Qi", right, opened), 0)
            os.close(opened)
        if libc.syscall(_SYS_RESTRICT_SELF, rules, 0):
            return []
        return ["processes", "files"] if abi >= 3 else ["processes"]  # before that it can truncate any file
    finally:
        os.close(rules)


def _is_for_all(entry: os.DirEntry[str]) -> bool:
    """Whether an entry of /dev is a device that everybody may write to, such as the null device, or a GPU."""
    mode = entry.stat(follow_symlinks=False).st_mode
    return entry.name.startswith(("nvidia", "kfd", "dri")) or bool(stat.S_ISCHR(mode) and mode & stat.S_IWOTH)


_AF_UNIX = 1
_X32 = 0x4000_0000
_CALLS = {
    "x86_64": (0xC000_003E, 41, (42, 50, 425, 438)),
    "aarch64": (0xC000_00B7, 198, (203, 201, 425, 438)),
}
"""By machine: its number in filters, and those of `socket`, and of `connect`, `listen`, `io_uring_setup` (which makes
sockets, too) and `pidfd_getfd`."""


def _filter(libc: ctypes.CDLL) -> bool:
    """Refuse by seccomp what leads to a connection; local sockets can be made, as drivers do, but not connected."""
    if platform.machine() not in _CALLS:
        return False
    machine, socket, refused = _CALLS[platform.machine()]
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
    allow, refuse = 0x7FFF_0000, 0x0005_0001  # errno 1, EPERM
    # Each instruction: code, how many to skip if true and if false, operand. The last two are `allow` and `refuse`.
    last = 8 + len(refused)
    program = [
        (load, 0, 0, 4),
        (equal, 0, last - 2, machine),
        (load, 0, 0, 0),
        (at_least, last - 4, 0, _X32),
        *[(equal, last - 5 - place, 0, number) for place, number in enumerate(refused)],
        (equal, 0, 2, socket),
        (load, 0, 0, 16),
        (equal, 0, 1, _AF_UNIX),
        (end, 0, 0, allow),
        (end, 0, 0, refuse),
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    held = ctypes.create_string_buffer(code)
    head = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(held))
    return not libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head, 0, 0)


def _main() -> None:
    folder, *command = sys.argv[1:]
    os.write(1, json.dumps({"isolation": isolate(folder)}).encode() + b"\n")
    os.execv(command[0], command)  # noqa: S606


if __name__ == "__main__":
    _main()
