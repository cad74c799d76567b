"""QEMU of a lab host: its arguments, and the two sockets by which it and its guest take orders."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .scenarios import Scenario
from .system import LabError

PROGRAM = "qemu-system-x86_64"
MEMORY_MIB = 1024
PROCESSORS = 1  # a second one costs more than it gives: translated threads wait for each other
BOOT_WORDS = "root=/dev/vda rw console=ttyS0 quiet net.ifnames=0 nokaslr audit=0 systemd.service_watchdogs=0"
# Where QEMU, in its own tree, sees the base images and the folder of its host.
IMAGES, HOST = "/lab/images", "/lab/host"
MONITOR, AGENT = "qmp.sock", "agent.sock"
# Ports get slots from here on; below are the virtio devices.
_FIRST_SLOT = 0x10


def gpu_socket(number: int) -> str:
    """Return the name of a simulated GPU's socket in the host's folder."""
    return f"gpu{number}.sock"


def arguments(
    scenario: Scenario, *, name: str, kernel: str, initrd: str, tap: int, mac: str, uuid: str, incoming: str | None
) -> list[str]:
    """Return QEMU's command line, all paths as seen in its tree.

    `tap` is an inherited file descriptor; `incoming` a saved state to start from, paused, or None for a cold boot. A
    saved state fits only the same devices in the same order.
    """
    words = [
        *(PROGRAM, "-nodefaults", "-no-user-config", "-display", "none", "-name", name, "-uuid", uuid),
        *("-machine", "q35,kernel-irqchip=off", "-accel", "tcg,thread=multi,tb-size=256", "-cpu", "qemu64"),
        *("-m", str(MEMORY_MIB), "-smp", str(PROCESSORS)),
        *("-kernel", kernel, "-initrd", initrd, "-append", f"{BOOT_WORDS} {scenario.kernel_words}".strip()),
        *("-drive", f"file={HOST}/disk.qcow2,if=none,id=disk,cache=unsafe"),
        *("-netdev", f"tap,id=net,fd={tap}", "-serial", f"file:{HOST}/console.log"),
        *("-qmp", f"unix:{HOST}/{MONITOR},server=on,wait=off"),
        *("-chardev", f"socket,id=agent,path={HOST}/{AGENT},server=on,wait=off"),
    ]
    if scenario.iommu:
        words += ["-device", "intel-iommu,intremap=on,caching-mode=on,device-iotlb=on"]
    for device in (
        "virtio-blk-pci,drive=disk,addr=2",
        f"virtio-net-pci,netdev=net,mac={mac},romfile=,addr=3",
        "virtio-rng-pci,addr=4",
        "virtio-serial-pci,addr=5",
        "virtserialport,chardev=agent,name=org.qemu.guest_agent.0",
    ):
        words += ["-device", device]
    for device in _slots(scenario):
        words += ["-device", device]
    for number, bus in enumerate(gpu_buses(scenario)):
        path = f"{HOST}/{gpu_socket(number)}"
        gpu = {"driver": "vfio-user-pci", "id": f"gpu{number}", "bus": bus, "socket": {"type": "unix", "path": path}}
        words += ["-device", json.dumps(gpu)]
    if incoming is not None:
        words += ["-incoming", f"file:{incoming}"]
    return words


def _slots(scenario: Scenario) -> Iterator[str]:
    """Yield the ports: a switch under the first root port where a GPU sits below one, then a root port per GPU."""
    below = [number for number, gpu in enumerate(scenario.gpus) if gpu.place == "switch"]
    slot = 1
    port = "pcie-root-port,x-speed=32,x-width=16"
    if below:
        yield f"{port},id=root{slot},chassis={slot},slot={slot},addr={_FIRST_SLOT:#x}"
        yield f"x3130-upstream,id=switch,bus=root{slot}"
        for number in below:
            slot += 1
            yield f"xio3130-downstream,id=port{number},bus=switch,chassis={slot},slot={slot}"
    for number, gpu in enumerate(scenario.gpus):
        if gpu.place == "root":
            slot += 1
            yield f"{port},id=port{number},chassis={slot},slot={slot},addr={_FIRST_SLOT + number + 1:#x}"


def gpu_buses(scenario: Scenario) -> list[str]:
    """Return the id of the port above each GPU."""
    return [f"port{number}" for number in range(len(scenario.gpus))]


@contextmanager
def connected(folder: Path, name: str, timeout_s: float) -> Iterator[socket.socket]:
    """Connect to a Unix socket of a folder. The way over the folder's descriptor has no limit on the path's length."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(f"/proc/self/fd/{descriptor}/{name}")
        yield connection
    except TimeoutError as error:
        raise LabError(f"{folder.name}: {name} gave no answer within {timeout_s:g} s") from error
    except OSError as error:
        raise LabError(f"{folder.name}: {name}: {error.strerror or error}") from error
    finally:
        connection.close()
        os.close(descriptor)


class Monitor:
    """QEMU's own control socket (QMP)."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rwb")
        self._line()  # the greeting
        self("qmp_capabilities")

    def __call__(self, order: str, **arguments: Any) -> Any:
        """Give one order and return what it returns; a refusal is a LabError."""
        self._stream.write(json.dumps({"execute": order, "arguments": arguments}).encode() + b"\n")
        self._stream.flush()
        while True:
            answer = self._line()
            if "error" in answer:
                raise LabError(f"QEMU refuses {order}: {answer['error'].get('desc', answer['error'])}")
            if "return" in answer:
                return answer["return"]

    def _line(self) -> dict[str, Any]:
        line = self._stream.readline()
        if not line:
            raise LabError("QEMU has ended")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def monitor(folder: Path, timeout_s: float = 20) -> Iterator[Monitor]:
    """Connect to the monitor of the host in this folder."""
    with connected(folder, MONITOR, timeout_s) as connection:
        yield Monitor(connection)


def wait_running(folder: Path, timeout_s: float) -> None:
    """Let a guest that starts from a saved state run, as soon as the state is read."""
    give_up = time.monotonic() + timeout_s
    with monitor(folder, timeout_s) as order:
        while (status := order("query-status")["status"]) == "inmigrate":
            if time.monotonic() > give_up:
                raise LabError(f"{folder.name}: the saved state was not read within {timeout_s:g} s")
            time.sleep(0.05)
        if status != "running":
            order("cont")


def save(folder: Path, target: str, timeout_s: float) -> None:
    """Stop the guest, write its state to `target` (a path as QEMU sees it) and end QEMU."""
    give_up = time.monotonic() + timeout_s
    with monitor(folder, timeout_s) as order:
        order("stop")
        order("migrate", uri=f"file:{target}")
        while (found := order("query-migrate")).get("status") != "completed":
            if found.get("status") == "failed" or time.monotonic() > give_up:
                raise LabError(f"{folder.name}: its state was not saved: {found.get('error-desc', found)}")
            time.sleep(0.1)
        order("quit")


class Agent:
    """The guest's own helper (qemu-guest-agent): runs programs in it as root, without network."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._stream = connection.makefile("rwb")
        self._timeout_s = timeout_s
        mark = secrets.randbelow(2**31)
        # FF ends what an earlier caller may have left half written.
        self._stream.write(b"\xff")
        self._send("guest-sync-delimited", {"id": mark})
        while True:
            line = self._stream.readline()
            if not line:
                raise LabError("QEMU has ended")
            with contextlib.suppress(ValueError):
                if json.loads(line.rpartition(b"\xff")[2]).get("return") == mark:
                    return

    def __call__(self, order: str, **arguments: Any) -> Any:
        """Give one order and return what it returns."""
        self._send(order, arguments)
        line = self._stream.readline()
        answer = json.loads(line) if line else {"error": {"desc": "QEMU has ended"}}
        if "error" in answer:
            raise LabError(f"the guest's agent refuses {order}: {answer['error'].get('desc', answer['error'])}")
        return answer["return"]

    def run(self, argv: Sequence[str], given: bytes = b"") -> tuple[int, str, str]:
        """Run a program in the guest; returns exit code, stdout and stderr."""
        options: dict[str, Any] = {"path": argv[0], "arg": list(argv[1:]), "capture-output": True}
        if given:
            options["input-data"] = base64.b64encode(given).decode()
        pid = self("guest-exec", **options)["pid"]
        give_up = time.monotonic() + self._timeout_s
        pause_s = 0.02
        while not (state := self("guest-exec-status", pid=pid))["exited"]:
            if time.monotonic() > give_up:
                raise LabError(f"`{' '.join(argv)[:60]}` in the guest did not end within {self._timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.5)
        texts = [base64.b64decode(state.get(key, "")).decode(errors="replace") for key in ("out-data", "err-data")]
        return state.get("exitcode", 128 + state.get("signal", 0)), texts[0], texts[1]

    def _send(self, order: str, arguments: dict[str, Any]) -> None:
        self._stream.write(json.dumps({"execute": order, "arguments": arguments}).encode() + b"\n")
        self._stream.flush()


@contextmanager
def agent(folder: Path, timeout_s: float = 30) -> Iterator[Agent]:
    """Connect to the agent in the guest of the host in this folder."""
    with connected(folder, AGENT, timeout_s) as connection:
        yield Agent(connection, timeout_s)
