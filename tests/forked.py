"""Programs in processes of their own that need not import torch: forks of a server that has done so once.

    process = Forked("import sys, torch; print(sys.argv[1:])", 1, 2, stdout=subprocess.PIPE, text=True)

It is ``python -c program 1 2`` to all who look: a child of this process, with its pipes and its end.
"""

import atexit
import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

__all__ = ["Forked", "run_module"]

_ROOT = Path(__file__).parent.parent
_SET_CHILD_SUBREAPER = 36
_LONGEST = 2**18


class Forked(subprocess.Popen[str]):
    """A process that runs a program.

    Args:
        program: May be indented.
        *arguments: Of the program, as text.
        **options: Of ``Popen``: its pipes, ``env``, and ``cwd``, by default the repository.
    """

    _server: socket.socket | None = None

    def __init__(self, program: str, *arguments: object, **options: Any) -> None:
        command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
        super().__init__(command, text=True, **{"cwd": _ROOT, **options})

    def _execute_child(self, args: Any, *more: Any) -> None:
        if sys.platform != "linux":
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        cwd, env, pipes = more[4], more[5], more[9:15]
        request = json.dumps([args[2:], str(cwd), dict(env or os.environ)]).encode()
        given = [pipe if pipe >= 0 else number for number, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        server = type(self)._server = type(self)._server or _start_server()
        _adopt_orphans(True)
        try:
            socket.send_fds(server, [request], given)
            self.pid = int(server.recv(20))
            server.recv(1)  # It has no other parent now.
        finally:
            _adopt_orphans(False)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run_module(name: str) -> str:
    """Return the program that ``python -m name`` is."""
    return f"import runpy; runpy.run_module({name!r}, run_name='__main__')"


def _adopt_orphans(is_on: bool) -> None:
    """Let the processes whose parents end be children of this one, or no longer."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, is_on, 0, 0, 0)


def _start_server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.forked", str(theirs.fileno())]
    nowhere = dict.fromkeys(("stdin", "stdout"), subprocess.DEVNULL)
    server = subprocess.Popen(command, cwd=_ROOT, pass_fds=[theirs.fileno()], **nowhere)
    theirs.close()
    atexit.register(lambda: (ours.close(), server.wait()))
    return ours


def _serve(tests: socket.socket) -> str:
    """Fork for each request; in a fork, return its program."""
    import torch.distributed.tensor  # noqa: F401

    import composable  # noqa: F401

    gc.freeze()
    while True:
        request, pipes, _, _ = socket.recv_fds(tests, _LONGEST, 3)
        if not request:
            os._exit(0)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            tests.send(b".")
            for pipe in pipes:
                os.close(pipe)
            continue
        if child := os.fork():
            tests.send(str(child).encode())
            os._exit(0)
        tests.close()
        for number, pipe in enumerate(pipes):
            os.dup2(pipe, number)
            os.close(pipe)
        (program, *arguments), cwd, env = json.loads(request)
        os.chdir(cwd)
        sys.argv = ["-c", *arguments]
        os.environ.clear()
        os.environ.update(env)
        return program


if __name__ == "__main__":
    # What is behind this line is the end of the program's own process.
    exec(compile(_serve(socket.socket(fileno=int(sys.argv[1]))), "<string>", "exec"), {"__name__": "__main__"})
