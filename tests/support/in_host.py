"""Run a module in a host that `tests.support.hosts` made: python -m tests.support.in_host INIT MODULE ARGUMENTS...

The process that runs it must have one thread, as a fork has.
"""

import ctypes
import os
import runpy
import sys

_MOUNTS, _NAMES, _PROCESSES, _NETWORK = 0x00020000, 0x04000000, 0x20000000, 0x40000000


def enter(init: int) -> None:
    """Enter the namespaces of a process. Its process numbers are those of children from now on."""
    folder, descriptor = os.getcwd(), os.pidfd_open(init)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _MOUNTS | _NAMES | _PROCESSES | _NETWORK):
        raise OSError(ctypes.get_errno(), f"cannot enter the namespaces of process {init}")
    os.close(descriptor)
    os.chdir(folder)


def main() -> None:
    init, sys.argv = int(sys.argv[1]), sys.argv[2:]
    enter(init)
    child = os.fork()
    if not child:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    _, status = os.waitpid(child, 0)
    # without handlers of the interpreter: they are the child's
    os._exit(max(os.waitstatus_to_exitcode(status), 1) if status else 0)


if __name__ == "__main__":
    main()
