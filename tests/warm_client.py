"""The client of `warm_python.py`: `warm_client.py SOCKET WORDS...` runs `python WORDS...` in a fork of the server."""

import json
import os
import signal
import socket
import sys


def main() -> None:
    """Hand over arguments and streams, forward signals, and exit as the program does."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(sys.argv[1])
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))  # no signal within the request
        request = {"words": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}  # noqa: PTH109
        data = json.dumps(request).encode()
        socket.send_fds(server, [len(data).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(data)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
        answer = server.recv(4, socket.MSG_WAITALL)
    if len(answer) < 4:
        sys.exit("warm_python: the server has ended")
    code = os.waitstatus_to_exitcode(int.from_bytes(answer, "big"))
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
