"""Run a command without some system calls: `python tests/confined.py memfd_create,pidfd_open COMMAND...`.

A seccomp filter makes them fail with ENOSYS, as on a kernel without them or in a container that blocks them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

__all__ = ["without"]

_NUMBERS = {"x86_64": {"memfd_create": 319, "pidfd_open": 434}, "aarch64": {"memfd_create": 279, "pidfd_open": 434}}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER_MODE = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def without(*names: str) -> list[str]:
    """Return the start of a command line that runs the rest of it without these system calls."""
    return [sys.executable, __file__, ",".join(names)]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _deny(numbers: list[int]) -> None:
    code = [_instruction(_LOAD, 0)]
    code += [_instruction(_JUMP_IF_EQUAL, number, len(numbers) - place) for place, number in enumerate(numbers)]
    code += [_instruction(_RETURN, _ALLOW), _instruction(_RETURN, _ERRNO | errno.ENOSYS)]
    text = ctypes.create_string_buffer(b"".join(code))
    program = _Program(len(code), ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    _deny([_NUMBERS[platform.machine()][name] for name in sys.argv[1].split(",")])
    os.execvp(sys.argv[2], sys.argv[2:])
