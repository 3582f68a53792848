"""A Python that starts in milliseconds: a server that has imported torch forks for every program.

    subprocess.run([*warm_python.interpreter(), "-m", "compressive", "config"])

Use it in place of `sys.executable` for tests of what a program does. Tests of start-up itself (imports, memory,
torchrun, another value of TRITON_INTERPRET) use `sys.executable`. Programs are processes of their own, with the
arguments, working directory, environment, standard streams, signals and exit code of a command that was started:

- The server (this file as a script), one per process of pytest, imports torch and waits. It has one thread and has
  imported nothing of this package: every program imports that itself, along its own PYTHONPATH.
- The client (`warm_client.py`) is what `subprocess` starts. It sends arguments, environment and streams to the server,
  forwards signals, and exits as the program did. If the client is killed, so is the program.
- A supervisor, forked by the server for every program, waits for the program and reports its status.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "numpy", "safetensors.torch", "torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch.distributed.tensor", "torch.nn.parallel", "torch.optim", "tyro", "matplotlib.pyplot",
)  # fmt: skip


@functools.cache
def interpreter() -> list[str]:
    """Start the server of this process; return the command that starts a program, to be used like `[sys.executable]`.

    Outside Linux it is `[sys.executable]`.
    """
    if sys.platform != "linux":
        return [sys.executable]
    folder = Path(tempfile.mkdtemp(prefix="warm-python-"))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        listening.listen(64)
        server = subprocess.Popen(
            [sys.executable, __file__, str(listening.fileno())], pass_fds=[listening.fileno()],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    owner = os.getpid()

    def stop() -> None:
        if os.getpid() == owner:  # not in a fork of this process
            server.kill()
            server.wait()
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    client = Path(__file__).with_name("warm_client.py")
    return [sys.executable, "-I", "-S", str(client), str(folder / "socket")]


def serve(fd: int) -> list[str]:
    """Import what takes long, then fork for every client. Returns in the forked program, with its arguments."""
    parent = os.getppid()
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # extras
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "threads are lost in a fork"  # noqa: PTH208
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=fd) as listening:
        while os.getppid() == parent:
            with contextlib.suppress(ChildProcessError):  # supervisors that have ended
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not select.select([listening], [], [], 1)[0]:
                continue
            client, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                return supervise(client)
            client.close()
        shutil.rmtree(Path(listening.getsockname()).parent, ignore_errors=True)  # pytest was killed
    os._exit(0)


def supervise(client: socket.socket) -> list[str]:
    """Fork the program that the client asks for. Returns in the program, with its arguments."""
    head, streams, _, _ = socket.recv_fds(client, 8, 3)
    size = int.from_bytes(head, "big")
    data = client.recv(size, socket.MSG_WAITALL)
    if len(streams) < 3 or len(data) < size:  # the client was killed
        os._exit(0)
    request = json.loads(data)
    program = os.fork()
    if program == 0:
        client.close()
        become(request, streams)
        return list(request["words"])
    for stream in streams:
        os.close(stream)
    watch(client, program)


def watch(client: socket.socket, program: int) -> NoReturn:
    """Forward signals to the program until it ends, and report its status."""
    ended = os.pidfd_open(program)
    while True:
        ready, _, _ = select.select([client.fileno(), ended], [], [])
        if ended in ready:
            _, status = os.waitpid(program, 0)
            with contextlib.suppress(OSError):
                client.sendall(status.to_bytes(4, "big"))
            os._exit(0)
        numbers = client.recv(64)
        for number in numbers or [signal.SIGKILL]:
            os.kill(program, number)
        if not numbers:  # the client was killed
            os.waitpid(program, 0)
            os._exit(0)


def become(request: dict[str, Any], streams: list[int]) -> None:
    """Take over the streams, working directory and environment of the request."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.modules["numpy"].random.seed()  # as in a new process, every program has a seed of its own
    sys.modules["torch"].default_generator.seed()
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = output(1, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = output(2, "backslashreplace")  # type: ignore[misc]


def output(number: int, errors: str) -> io.TextIOWrapper:
    """Return a text stream that is buffered as Python's own."""
    raw = io.FileIO(number, "w", closefd=False)
    if os.environ.get("PYTHONUNBUFFERED"):
        return io.TextIOWrapper(raw, "utf-8", errors, write_through=True)
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", errors, line_buffering=number == 2)


def run(words: list[str]) -> None:
    """Run `-m MODULE`, `-c CODE` or a script with its arguments, as Python does."""
    kind, rest = words[0], words[1:]
    first = {"-m": str(Path.cwd()), "-c": ""}.get(kind, str(Path(kind).resolve().parent))
    extra = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *extra, *sys.path[1:]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


def leave(words: list[str]) -> NoReturn:
    """Run a program and exit as Python does, but without the half second in which it takes torch's modules down."""
    code: object = 0
    try:
        run(words)
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the program, or by its reader
            stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    leave(serve(int(sys.argv[1])))
