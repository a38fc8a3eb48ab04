"""Run as `called.py SOCKET ...`: the command of `interpreter.py`. It imports little, and starts in
no time.

It gives its arguments and all it has, namespaces included, to the process that is forked for it,
passes on signals, and ends as that does.
"""

import json
import os
import signal
import socket
import sys


def main(address: str, arguments: list[str]) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        call = {"arguments": arguments, "env": dict(os.environ), "folder": os.getcwd()}
        data = json.dumps(call).encode() + b"\n"
        spaces = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("mnt", "net", "uts")]
        server.sendall(data[socket.send_fds(server, [data], [0, 1, 2, *spaces]) :])
        answers = server.makefile()
        process = int(answers.readline())
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _: os.kill(process, number))
        status = int(answers.readline())
    if os.WIFSIGNALED(status):
        if (number := os.WTERMSIG(status)) != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
