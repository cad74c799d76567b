"""Lab hosts as virtual machines: QEMU without KVM, restored from a saved state; a real kernel, PCI bus and IOMMU.

Their GPUs are simulated (`simulated_gpus`). The first start of a scenario boots it once and saves it; each host then
starts from that state. A host that was switched off boots from its disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import cgroups, container, network, proxmox, qemu, simulated_gpus, vm_image
from .scenarios import SCENARIOS, Scenario, gpu_addresses
from .state import Host, Paths, locked
from .system import LabError, Progress, command, require_space

BOOT_TIMEOUT_S = 400  # 30-50 s on a quiet machine
RESTORE_TIMEOUT_S = 120  # 3-5 s on a quiet machine
SAVE_TIMEOUT_S = 120
AGENT_TRY_S = 5
SAVED_MIB = 1200
INTERFACE = "eth0"
NODE_BEFORE = "peerlane-lab-node"
TUN = Path("/dev/net/tun")
COMM = qemu.PROGRAM[:15]  # the kernel keeps so much of a process's name
# linux/if_tun.h
_TUNSETIFF = 0x400454CA
_TAP = 0x0002 | 0x1000 | 0x4000  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR

# Loaded once before the state is saved, so that each restored host has it in memory.
_WARM_UP = """\
loginctl enable-linger root
systemctl start user@0.service
python3 -c 'import base64, concurrent.futures, glob, json, os, re, shutil, subprocess, tempfile, traceback, zipfile'
lspci -Dvvvnn >/dev/null
dpkg-query -W >/dev/null
"""
_ACS_OFF_UNIT = """\
[Unit]
Description=Switch ACS off in every PCI bridge
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'for port in $(lspci -Dd ::0604 | cut -d" " -f1); do \
setpci -s $port ECAP_ACS+0x6.w=0000 2>/dev/null || true; done'
[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True)
class Base:
    """What a host was made from; it must stay the same for as long as the host is there. Names within the images."""

    tree: str
    image: str
    saved: str


def leader(paths: Paths, name: str) -> int | None:
    """Return the process id of the host's QEMU, or None where it does not run."""
    for pid in cgroups.processes(paths.lab_id, name):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == COMM:
                return pid
        except OSError:
            continue
    return None


def is_running(paths: Paths, name: str) -> bool:
    """Tell whether the host's QEMU runs."""
    return leader(paths, name) is not None


def uses(images: Path) -> bool:
    """Tell whether a virtual machine of any lab runs from these images."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text().strip() == COMM and (process / f"root{qemu.IMAGES}").samefile(images):
                return True
        except OSError:
            continue
    return False


def make(paths: Paths, host: Host, progress: Progress) -> None:
    """Make the host's disk over the scenario's saved one, unless it is complete; saves the scenario where needed."""
    folder = paths.host(host.name)
    if (folder / "complete").exists():
        return
    if not TUN.exists():
        raise LabError(f"{TUN} is not there, so a virtual machine gets no network; run: modprobe tun")
    scenario = SCENARIOS[host.scenario]
    tree, disk = vm_image.qemu_tree(paths, progress), vm_image.guest_image(paths, progress)
    require_space(paths.root, SAVED_MIB, f"host {host.name}")
    if folder.exists():
        container.discard(paths, host.name)
    folder.mkdir(parents=True)
    saved = _ensure_saved(paths, host, scenario, tree, disk, progress)
    base = Base(tree.name, disk.name, str(saved.relative_to(paths.images)))
    (folder / "base.json").write_text(json.dumps(base.__dict__), encoding="utf-8")
    vm_image.overlay(tree, paths, folder, f"{qemu.IMAGES}/{base.saved}/disk.qcow2", "qcow2")
    _write_gpus(folder, scenario)
    key = folder / "host_key"
    command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", host.name, "-f", key])
    (folder / "complete").touch()


def start(paths: Paths, host: Host, network_number: int, progress: Progress) -> None:
    """Start a stopped host and wait until it can be used: from the saved state the first time, then from its disk."""
    folder = paths.host(host.name)
    container.release(paths, host.name)
    base = _base(paths, folder)
    first = not (folder / "started").exists()
    began = time.monotonic()
    (folder / "gpus.saved.json").unlink(missing_ok=True)
    if first:
        shutil.copyfile(paths.images / base.saved / "gpus.saved.json", folder / "gpus.saved.json")
    tap = network.veth(network_number, host.octet)
    incoming = f"{qemu.IMAGES}/{base.saved}/state" if first else None
    _launch(paths, host, paths.images / base.tree, base.image, tap, _mac(network_number, host.octet), incoming)
    command(["ip", "link", "set", tap, "master", network.bridge(network_number), "up"])
    (folder / "started").touch()
    if first:
        qemu.wait_running(folder, RESTORE_TIMEOUT_S)
    else:
        progress(f"{host.name}: booting from its disk, for half a minute or more")
    _wait_agent(paths, host, RESTORE_TIMEOUT_S if first else BOOT_TIMEOUT_S)
    address = network.address(network_number, host.octet)
    registers = (paths.images / base.saved / "registers").read_text(encoding="utf-8") if first else ""
    _personalise(paths, host, network_number, registers)
    give_up = time.monotonic() + RESTORE_TIMEOUT_S
    while not container.answers_ssh(address):
        if time.monotonic() > give_up:
            raise LabError(f"{host.name}: runs, but no SSH at {address} within {RESTORE_TIMEOUT_S} s")
        time.sleep(0.1)
    progress(f"{host.name}: {host.scenario} at {address}, ready {time.monotonic() - began:.1f} s after start")


def inside(paths: Paths, name: str, argv: list[str], *, check: bool = True, timeout_s: float = 60) -> str:
    """Run a program inside a running host without SSH, as root, and return its output."""
    if not is_running(paths, name):
        raise LabError(f"{name} is not running")
    words = argv if argv[0].startswith("/") else ["/usr/bin/env", *argv]
    with qemu.agent(paths.host(name), timeout_s) as agent:
        code, output, errors = agent.run(words)
    if check and code != 0:
        lines = [line for line in (errors + output).splitlines() if line.strip()]
        raise LabError(f"{name}: `{' '.join(argv)[:60]}` failed ({code}): {lines[-1] if lines else 'no output'}")
    return output


def _base(paths: Paths, folder: Path) -> Base:
    base = Base(**json.loads((folder / "base.json").read_text(encoding="utf-8")))
    for name in (base.tree, f"{base.image}/vmlinuz", f"{base.saved}/state"):
        if not (paths.images / name).exists():
            raise LabError(f"{paths.images / name} is gone; `peerlane lab down {folder.name}` and up again")
    return base


def _ensure_saved(paths: Paths, host: Host, scenario: Scenario, tree: Path, disk: Path, progress: Progress) -> Path:
    """Return the folder with the saved state, disk and GPU registers of a scenario; boots and saves it once."""
    saved = disk / "saved" / f"{host.scenario}-{_saved_fingerprint(scenario, tree)}"
    if saved.is_dir():
        return saved
    with locked(paths.images / f".vm-{host.scenario}.lock"):
        if saved.is_dir():
            return saved
        require_space(paths.images, SAVED_MIB, f"the saved state of scenario {host.scenario}")
        progress(f"{host.scenario}: booting and saving the scenario, once (1-3 minutes)")
        folder = paths.host(host.name)
        _write_gpus(folder, scenario)
        try:
            _boot_to_save(paths, host, tree, disk, progress)
            with qemu.agent(folder, BOOT_TIMEOUT_S) as agent:
                _prepare(agent, scenario)
                spaces = {
                    address: _in_guest(agent, f"od -An -v -tx1 -N64 /sys/bus/pci/devices/{address}/config")
                    for address in gpu_addresses(scenario)
                }
            words = [f"-s {address} {_registers(bytes.fromhex(space))}" for address, space in spaces.items()]
            (folder / "registers").write_text(" ".join(words), encoding="utf-8")
            qemu.save(folder, f"{qemu.HOST}/state", SAVE_TIMEOUT_S)
            _end_gpus(paths, host.name)
            aside = saved.with_name(f".{saved.name}")
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            for name in ("state", "disk.qcow2", "gpus.saved.json", "registers"):
                shutil.move(folder / name, aside / name)
            aside.rename(saved)
        finally:
            container.release(paths, host.name)
    return saved


def _boot_to_save(paths: Paths, host: Host, tree: Path, disk: Path, progress: Progress) -> None:
    """Boot the scenario from a fresh disk; once more where the machine was too busy for the guest's own time limits."""
    folder = paths.host(host.name)
    for again in (True, False):
        vm_image.overlay(tree, paths, folder, f"{qemu.IMAGES}/{disk.name}/disk.raw", "raw")
        try:
            _launch(paths, host, tree, disk.name, "plsave%d", "52:54:00:77:00:01", None)
            _wait_agent(paths, host, BOOT_TIMEOUT_S)
        except LabError as error:
            if not again or not is_running(paths, host.name):
                raise
            progress(f"{error}; booting it once more")
            container.release(paths, host.name)
        else:
            return


def _saved_fingerprint(scenario: Scenario, tree: Path) -> str:
    """Return eight hex digits that change with all that a saved state depends on, beside the disk below it."""
    words = qemu.arguments(scenario, name="", kernel="", initrd="", tap=0, mac="", uuid="", incoming=None)
    spaces = [simulated_gpus.config_space(int(gpu.device, 16), gpu.clique, 0) for gpu in scenario.gpus]
    node = proxmox.sources() if scenario.proxmox else ""
    parts = (words, spaces, _files(scenario), _script(scenario), node, scenario.fingerprint, tree.name)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def _write_gpus(folder: Path, scenario: Scenario) -> None:
    entries = [
        {"socket": qemu.gpu_socket(number), "device": gpu.device, "clique": gpu.clique}
        for number, gpu in enumerate(scenario.gpus)
    ]
    (folder / "gpus.json").write_text(json.dumps(entries), encoding="utf-8")


def _files(scenario: Scenario) -> dict[str, str]:
    """Return the files that make the guest this scenario."""
    files = {}
    if scenario.vfio:
        ids = ",".join(sorted({f"10de:{gpu.device}" for gpu in scenario.gpus}))
        files["/etc/modprobe.d/vfio.conf"] = f"options vfio-pci ids={ids} disable_vga=1\n"
        files["/etc/modules-load.d/vfio.conf"] = "vfio\nvfio_iommu_type1\nvfio_pci\n"
    if scenario.acs is False:
        files["/etc/systemd/system/peerlane-lab-acs-off.service"] = _ACS_OFF_UNIT
    return files


def _script(scenario: Scenario) -> str:
    """Return what is run in the guest once, before its state is saved; a part of it takes effect at each boot again."""
    lines = ["set -e", "systemctl is-system-running --wait >/dev/null || true"]
    if scenario.vfio:
        lines.append("modprobe vfio-pci")
    if scenario.acs is False:
        lines.append("systemctl enable --now peerlane-lab-acs-off.service")
    return "\n".join([*lines, _WARM_UP, "sync"])


def _prepare(agent: qemu.Agent, scenario: Scenario) -> None:
    for name, text in _files(scenario).items():
        _in_guest(agent, f"cat >{shlex.quote(name)}", text.encode())
    _in_guest(agent, _script(scenario))
    if scenario.proxmox:
        addresses = gpu_addresses(scenario)
        groups = _in_guest(
            agent,
            f"for gpu in {' '.join(addresses)}; do basename $(readlink /sys/bus/pci/devices/$gpu/iommu_group); done",
        )
        passed = [
            proxmox.Passed(address, gpu.device, int(group))
            for address, gpu, group in zip(addresses, scenario.gpus, groups.split(), strict=True)
        ]
        _in_guest(agent, "tar -C / -xf -", proxmox.archive(NODE_BEFORE, passed, vm_image.NOTICE))
        _in_guest(agent, "systemctl daemon-reload && systemctl start peerlane-lab-guests.service")


def _registers(space: bytes) -> str:
    """Return setpci words that write what firmware and kernel wrote into a GPU's header: QEMU does not save it.

    The BARs, the interrupt line, and last the command register, which switches the memory on.
    """
    words = [f"{place:x}.l={int.from_bytes(space[place : place + 4], 'little'):08x}" for place in range(0x10, 0x28, 4)]
    return " ".join([*words, f"3c.b={space[0x3C]:02x}", f"4.w={space[5]:02x}{space[4]:02x}"])


def _in_guest(agent: qemu.Agent, script: str, given: bytes = b"") -> str:
    code, output, errors = agent.run(["/bin/sh", "-c", script], given)
    if code != 0:
        lines = errors.strip().splitlines() or [output.strip() or "no output"]
        raise LabError(f"preparing the guest failed ({code}): {lines[-1]}")
    return output


def _launch(paths: Paths, host: Host, tree: Path, disk: str, tap: str, mac: str, incoming: str | None) -> None:
    """Start the simulated GPUs and QEMU in the host's control group."""
    folder = paths.host(host.name)
    for name in ("gpus.ready", qemu.MONITOR, qemu.AGENT):
        (folder / name).unlink(missing_ok=True)
    argv = [sys.executable, "-m", simulated_gpus.__name__, str(folder)]
    package_folder = Path(__file__).parents[2]
    _spawn(paths, host.name, argv, "gpus.log", env={"PYTHONPATH": str(package_folder)})
    give_up = time.monotonic() + 20
    while not (folder / "gpus.ready").exists():
        if time.monotonic() > give_up:
            raise LabError(f"{host.name}: the simulated GPUs did not start: {_last_line(folder / 'gpus.log')}")
        time.sleep(0.02)
    descriptor = os.open(TUN, os.O_RDWR)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", tap.encode(), _TAP))
        words = qemu.arguments(
            SCENARIOS[host.scenario],
            name=host.name,
            kernel=f"{qemu.IMAGES}/{disk}/vmlinuz",
            initrd=f"{qemu.IMAGES}/{disk}/initrd",
            tap=descriptor,
            mac=mac,
            uuid=str(uuid.uuid5(uuid.NAMESPACE_URL, f"peerlane-lab:{paths.lab_id}:{host.name}")),
            incoming=incoming,
        )
        argv = vm_image.in_tree(tree, paths, folder, *words)
        _spawn(paths, host.name, argv, "qemu.log", descriptors=(descriptor,))
    finally:
        os.close(descriptor)
    give_up = time.monotonic() + 20
    while not (folder / qemu.MONITOR).exists() or leader(paths, host.name) is None:
        if time.monotonic() > give_up or _ended(paths, host.name):
            raise LabError(f"{host.name}: QEMU did not start: {_last_line(folder / 'qemu.log')}")
        time.sleep(0.05)


def _spawn(
    paths: Paths,
    name: str,
    argv: Sequence[str],
    log: str,
    env: dict[str, str] | None = None,
    descriptors: tuple[int, ...] = (),
) -> None:
    groups = [str(directory) for directory in cgroups.make(paths.lab_id, name)]
    with (paths.host(name) / log).open("wb") as output:
        subprocess.Popen(
            ["/bin/sh", str(container.SUPERVISOR), *groups, "--", *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd="/",
            pass_fds=descriptors,
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **(env or {})},
        )


def _ended(paths: Paths, name: str) -> bool:
    """Tell whether QEMU has written a complaint and gone."""
    return leader(paths, name) is None and (paths.host(name) / "qemu.log").stat().st_size > 0


def _end_gpus(paths: Paths, name: str) -> None:
    """Let the simulated GPUs write down their configuration spaces and end."""
    file = paths.host(name) / "gpus.saved.json"
    for pid in cgroups.processes(paths.lab_id, name):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if simulated_gpus.__name__.encode() in line and not line.startswith(b"/bin/sh"):
                os.kill(pid, signal.SIGTERM)
        except (FileNotFoundError, ProcessLookupError):
            continue
    give_up = time.monotonic() + 20
    while not file.exists():
        if time.monotonic() > give_up:
            raise LabError(f"{name}: the simulated GPUs did not save their state: {_last_line(file)}")
        time.sleep(0.05)


def _wait_agent(paths: Paths, host: Host, timeout_s: float) -> None:
    """Wait until the guest takes orders; an early death of QEMU is reported with its last line."""
    folder = paths.host(host.name)
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            with qemu.agent(folder, AGENT_TRY_S) as agent:
                agent("guest-ping")
            return
        except LabError:
            if leader(paths, host.name) is None:
                raise LabError(f"{host.name}: QEMU ended: {_last_line(folder / 'qemu.log')}") from None
            if time.monotonic() > give_up:
                raise LabError(
                    f"{host.name}: the guest gave no answer within {timeout_s:g} s; last console line: "
                    f"{_last_line(folder / 'console.log')}"
                ) from None
        time.sleep(0.2)


def _mac(network_number: int, octet: int) -> str:
    """Return a host's hardware address: QEMU's prefix, then the last three parts of its IP address."""
    return f"52:54:00:4d:{network_number:02x}:{octet:02x}"


def _personalise(paths: Paths, host: Host, network_number: int, registers: str) -> None:
    """Give the running guest the time, and its own name, address and keys: a restored one has those of all others.

    `registers` are setpci's words for what QEMU did not restore; empty after a boot.
    """
    folder = paths.host(host.name)
    address, gateway = network.address(network_number, host.octet), network.gateway(network_number)
    mtu, mac = network.uplink_mtu(), _mac(network_number, host.octet)
    key, public = ((folder / name).read_text(encoding="utf-8") for name in ("host_key", "host_key.pub"))
    lab_key = paths.key.with_suffix(".pub").read_text(encoding="utf-8")
    unit = (
        f"[Match]\nName={INTERFACE}\n[Link]\nMTUBytes={mtu}\n[Network]\nAddress={address}/24\nGateway={gateway}\n"
        "LinkLocalAddressing=no\nIPv6AcceptRA=no\n"
    )
    files = {
        "/etc/hostname": f"{host.name}\n",
        "/etc/hosts": f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n::1 localhost\n",
        "/etc/resolv.conf": container.nameservers(),
        "/etc/systemd/network/10-lab.network": unit,
        "/etc/ssh/ssh_host_ed25519_key": key,
        "/etc/ssh/ssh_host_ed25519_key.pub": public,
        "/root/.ssh/authorized_keys": lab_key,
        "/home/admin/.ssh/authorized_keys": lab_key,
    }
    lines = [
        "set -e",
        *([] if registers else ["systemctl is-system-running --wait >/dev/null || true"]),
        f"date -s @{time.time():.0f} >/dev/null",
        f"hostname {host.name}",
        "install -d -m 700 /root/.ssh",
        "install -d -m 700 -o admin -g admin /home/admin/.ssh",
        *(f"printf %s {shlex.quote(text)} >{name}" for name, text in files.items()),
        "chown admin: /home/admin/.ssh/authorized_keys",
        f"ip address flush dev {INTERFACE}",
        f"ip link set {INTERFACE} down",
        f"ip link set {INTERFACE} address {mac} mtu {mtu}",
        f"ip address add {address}/24 dev {INTERFACE}",
        f"ip link set {INTERFACE} up",
        f"ip route replace default via {gateway}",
        *([f"setpci {registers}"] if registers else ["systemctl restart systemd-networkd"]),
        'kill -HUP "$(cat /run/sshd.pid)"',
    ]
    if SCENARIOS[host.scenario].proxmox:
        lines += proxmox.rename_lines(NODE_BEFORE, host.name)
    with qemu.agent(folder, RESTORE_TIMEOUT_S if registers else BOOT_TIMEOUT_S) as agent:
        _in_guest(agent, "sh -s", "\n".join(lines).encode())


def _last_line(file: Path) -> str:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
    except FileNotFoundError:
        return "none"
    return next((line for line in reversed(lines) if line), "none")
