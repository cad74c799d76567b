# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Serve one GGUF model with llama.cpp (package xllamacpp), and drain before ending.

    peerlane-serve RELEASE        read the arguments, one a line, from the file ``args`` in this folder
    peerlane-serve -- ARGUMENTS   take them from the command line

The names of the arguments are those of llama-server. SIGTERM stops accepting, lets running answers finish for up to
``--drain-timeout-s`` seconds and ends with 0; a second one ends at once. Bad arguments end with 2.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

# A connection that idles between two requests is closed by the server itself after this time.
IDLE_CONNECTION_S = 5.0
POLL_S = 0.05


def say(text: str) -> None:
    """Write one line to the journal."""
    print(f"peerlane: {text}", flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the arguments. Exits with 2 where one is unknown or has a wrong type."""
    parser = argparse.ArgumentParser(prog="peerlane-serve", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="GGUF file, or a folder that holds one")
    parser.add_argument("--alias", default="", help="name of the model in requests and answers")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--ctx-size", type=int, default=4096, help="tokens of context, shared by all slots")
    parser.add_argument("--parallel", type=int, default=4, help="answers computed at the same time")
    parser.add_argument("--threads", type=int, default=0, help="0: one per CPU that this process may use")
    parser.add_argument("--batch-size", type=int, default=0, help="0: as the engine decides")
    parser.add_argument("--ubatch-size", type=int, default=0, help="0: as the engine decides")
    parser.add_argument("--n-gpu-layers", type=int, default=-1, help="-1: as the engine decides")
    parser.add_argument("--drain-timeout-s", type=float, default=60.0)
    return parser.parse_args(arguments)


def read_release(folder: Path) -> list[str]:
    """Return the arguments of a release: the lines of its file ``args``."""
    try:
        text = (folder / "args").read_text(encoding="utf-8")
    except OSError as error:
        say(f"error: {folder / 'args'} cannot be read: {error.strerror}")
        raise SystemExit(2) from None
    return text.splitlines()


def gguf_file(path: Path) -> Path:
    """Return the file to load: this one, or the only (or the first of the split) GGUF file in this folder."""
    if not path.is_dir():
        if not path.exists():
            say(f"error: model {path} does not exist")
            raise SystemExit(2)
        return path
    files = sorted(path.glob("*.gguf"))
    first = [one for one in files if "-00001-of-" in one.name] or files
    if len(first) != 1:
        say(f"error: {path} holds {len(first)} models (*.gguf), not one")
        raise SystemExit(2)
    return first[0]


def stop_accepting(host: str, port: int) -> None:
    """Take the port from the engine without its noticing, so that running answers go on.

    The engine has no call for this, and an accept loop that fails cuts every stream. So its listening socket is
    replaced, under the same descriptor, by one that nobody can find; one own connection gets the loop off the old
    socket, which the kernel then closes: later clients are refused.
    """
    nowhere = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    nowhere.bind("")  # an abstract name, chosen by the kernel
    nowhere.listen(1)
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        try:
            with socket.socket(fileno=os.dup(descriptor)) as one:
                if one.family == socket.AF_UNIX or not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
        except OSError:
            continue
        os.dup2(nowhere.fileno(), descriptor)
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    with contextlib.suppress(OSError):
        socket.create_connection((target, port), timeout=1).close()


def open_connections(port: int) -> int:
    """Return how many clients are connected to this port of this machine."""
    count = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            columns = row.split()
            if columns[3] == "01" and int(columns[1].rpartition(":")[2], 16) == port:
                count += 1
    return count


def busy_requests(metrics: str) -> int:
    """Return how many requests are computed or wait for a slot, from the engine's metrics text."""
    total = 0
    for line in metrics.splitlines():
        name, _, value = line.partition(" ")
        if name in ("llamacpp:requests_processing", "llamacpp:requests_deferred"):
            total += int(float(value))
    return total


def drain(server: object, host: str, port: int, timeout_s: float) -> None:
    """Stop accepting, then wait until no request runs and every client has its last byte."""
    stop_accepting(host, port)
    deadline = time.monotonic() + timeout_s
    busy = busy_requests(str(server.handle_metrics()))  # type: ignore[attr-defined]
    say(f"draining: {busy} requests, at most {timeout_s:g} s")
    idle_since = time.monotonic()
    while time.monotonic() < deadline:
        busy = busy_requests(str(server.handle_metrics()))  # type: ignore[attr-defined]
        if busy:
            idle_since = time.monotonic()
        elif not open_connections(port) or time.monotonic() - idle_since > IDLE_CONNECTION_S:
            say("drained")
            return
        time.sleep(POLL_S)
    say(f"drain timeout: {busy} requests are cut off")


def main() -> int:
    """Load the model, serve until SIGTERM or SIGINT, drain."""
    if sys.argv[1:2] == ["--"]:
        options = parse(sys.argv[2:])
    elif len(sys.argv) == 2 and not sys.argv[1].startswith("-"):
        folder = Path(sys.argv[1]).resolve()
        say(f"release {folder.name}")
        options = parse(read_release(folder))
    else:
        print("usage: peerlane-serve RELEASE | peerlane-serve -- ARGUMENTS (--help for them)")
        return 0 if sys.argv[1:] == ["--help"] else 2
    model = gguf_file(Path(options.model))

    import xllamacpp  # type: ignore[import-not-found]

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    if options.alias:
        params.model_alias = {options.alias}
    params.hostnames = [options.host]
    params.port = options.port
    params.n_ctx = options.ctx_size
    params.n_parallel = options.parallel
    params.cpuparams.n_threads = options.threads or len(os.sched_getaffinity(0))
    if options.batch_size:
        params.n_batch = options.batch_size
    if options.ubatch_size:
        params.n_ubatch = options.ubatch_size
    if options.n_gpu_layers >= 0:
        params.n_gpu_layers = options.n_gpu_layers
    params.endpoint_metrics = True
    params.ui = False
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        say(f"error: {error}")
        return 1
    say(f"serving {model} on {server.listening_address}")

    stop = threading.Event()
    seen = []

    def on_signal(number: int, _frame: object) -> None:
        seen.append(number)
        if len(seen) > 1:
            say("second signal: ending at once")
            os._exit(128 + number)
        stop.set()

    # The engine installs its own handlers while it loads; these replace them.
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    while not stop.wait(3600):
        pass
    drain(server, options.host, options.port, options.drain_timeout_s)
    # The engine's destructor would wait for idle clients without limit.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
