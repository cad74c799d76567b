"""What `make demo` shows: a fresh host becomes a serving one, its model answers, and an audit finds a cause.

Where this machine can start a lab host, that host is provisioned by the real playbook. Where it cannot (no root, no
namespaces), the same engine and the same model are set up in a folder and serve in the foreground instead. Either way
the answer comes over HTTP from a real engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from . import operations
from .state import Paths, load
from .system import LabError, Progress, require_machine

CHECKOUT = Path(__file__).resolve().parents[1]
EXAMPLE = CHECKOUT / "docs/examples/eight-gpu-guest"
ENGINE = CHECKOUT / "roles/inference_engine/files/llama_cpp"
HOST = "demo"
PORT = 8000
READY_WITHIN_S = 60


def main() -> int:
    """Run the demo; returns an exit code."""
    if not EXAMPLE.is_dir():
        print("the demo runs from a clone of the repository: git clone, then make demo", file=sys.stderr)
        return 2
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peerlane/demo"
    why_not = _no_lab()
    _say("Peerlane demo: " + ("a lab host on this machine" if not why_not else "without a lab host"))
    if why_not:
        print(f"  {why_not}; so the engine and the model go to {home} and serve in the foreground")
    _say("1. The lab's own model (trained here in a few seconds, nothing is downloaded)")
    model = home / "lab-tiny"
    if not (model / "golden.json").exists():
        _run(sys.executable, "-m", "peerlane.lab.tiny_model", str(model), "--variant", "a")
    golden = json.loads((model / "golden.json").read_text(encoding="utf-8"))
    code = _foreground(home, model, golden) if why_not else _lab_host(home, model, golden)
    if code:
        return code
    _say("4. The audit of an 8-GPU Proxmox guest and its hypervisor (example files of this repository)")
    audit = subprocess.run([sys.executable, "-m", "peerlane", "audit", "--from", str(EXAMPLE)], check=False)
    if audit.returncode not in (0, 1):
        return audit.returncode
    _say("What to do next on your own hosts")
    print(
        """  peerlane init my-hosts                       a commented inventory to start from
  peerlane doctor -i my-hosts                  SSH, sudo, Python, disk: what would stop a provision
  peerlane audit -i my-hosts                   why is it slow? reads only
  peerlane provision -i my-hosts --check       what would change
  (. .venv/bin/activate puts `peerlane` on your PATH)"""
    )
    if not why_not:
        print(f"  peerlane lab ssh {HOST}                         look around on the demo host")
        print(f"  peerlane lab down {HOST}                        remove it")
    return 0


def _lab_host(home: Path, model: Path, golden: dict[str, Any]) -> int:
    _say("2. A fresh Debian host, provisioned by one playbook")
    paths = Paths.from_environment()
    for line in operations.up(paths, [HOST], operations.Wish(), Progress()):
        print(line, file=sys.stderr)
        return 3
    inventory = serving_inventory(home, paths, HOST, model, golden)
    provision = subprocess.run([sys.executable, "-m", "peerlane", "provision", "-i", str(inventory)], check=False)
    if provision.returncode:
        return provision.returncode
    _say("3. An answer from the model, streamed over HTTP")
    state = load(paths)
    _stream(f"http://{operations.host_address(state, operations.get_host(state, HOST))}:{PORT}", golden)
    return 0


def serving_inventory(home: Path, paths: Paths, host: str, model: Path, golden: dict[str, Any]) -> Path:
    """Write the inventory of one lab host: the lab's own, with what a user would set for a model."""
    lab = yaml.safe_load(paths.inventory.read_text(encoding="utf-8"))["lab"]
    lab["hosts"] = {host: lab["hosts"][host]}
    lab.setdefault("vars", {}).update(
        {
            "model_weights_name": "lab-tiny",
            "model_weights_source": str(model),
            "model_weights_source_on": "controller",
            "model_service_name": "demo",
            "model_service_host": "0.0.0.0",  # noqa: S104 - the lab network ends at this machine
            "model_service_port": PORT,
            "model_service_golden": golden,
        }
    )
    place = home / "inventory/hosts.yml"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(yaml.safe_dump({"lab": lab}, sort_keys=False), encoding="utf-8")
    return place


def _foreground(home: Path, model: Path, golden: dict[str, Any]) -> int:
    _say("2. The engine in a folder of its own")
    engine = home / "engine"
    if not (engine / "complete").exists():
        shutil.rmtree(engine, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(engine))
        (lock,) = sorted(ENGINE.glob("*.lock"))[-1:]
        _run(str(engine / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", str(lock))
        (engine / "complete").write_text("", encoding="utf-8")
    _say("3. An answer from the model, streamed over HTTP")
    port = _free_port()
    with _server(engine, model, port, home / "engine.log") as url:
        _stream(url, golden)
    return 0


@contextlib.contextmanager
def _server(engine: Path, model: Path, port: int, log: Path) -> Iterator[str]:
    """Run the engine in the foreground of a `with`, and end it as systemd would."""
    url = f"http://127.0.0.1:{port}"
    command = [str(engine / "bin/python"), str(ENGINE / "serve.py"), "--", "--model", str(model), "--port", str(port)]
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + READY_WITHIN_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
                raise LabError(f"the engine did not start: {''.join(last)}; its log is {log}")
            time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:  # noqa: S310 - an http address of our own
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _stream(url: str, golden: dict[str, Any]) -> None:
    """Ask the known prompt and print the answer as it comes."""
    body = {"prompt": golden["prompt"], "max_tokens": golden["max_tokens"], "temperature": 0, "stream": True}
    request = urllib.request.Request(  # noqa: S310 - an http address of our own
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    print(f"  {golden['prompt'].strip()} ", end="", flush=True)
    text = ""
    started = time.monotonic()
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        for line in answer:
            data = line.decode("utf-8", "replace").removeprefix("data:").strip()
            if not data or data == "[DONE]":
                continue
            choices = json.loads(data).get("choices") or [{}]
            piece = choices[0].get("text") or ""
            text += piece
            print(piece, end="", flush=True)
    elapsed = time.monotonic() - started
    print(f"\n  ({len(text.encode())} bytes in {elapsed:.2f} s, from {url})")
    if golden["answer"].strip() not in text:
        raise LabError(f"the model answered {text!r}, and not {golden['answer']!r}")


def _no_lab() -> str:
    """Say why no lab host can start here, or return ""."""
    try:
        require_machine()
    except LabError as error:
        return str(error).split(";", maxsplit=1)[0]
    return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _say(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    try:
        code = main()
    except (LabError, subprocess.CalledProcessError, urllib.error.URLError) as error:
        print(f"demo: {error}", file=sys.stderr)
        code = 3
    except KeyboardInterrupt:
        code = 130
    raise SystemExit(code)
