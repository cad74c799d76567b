#!/usr/bin/python3
"""SIMULATED qm, pvesh, pveversion and kvm: stand-ins of the Peerlane lab, not Proxmox VE.

One file under four names, for a lab host of kind `proxmox`. They read and write real files in Proxmox's format under
/etc/pve: a change of a running VM waits in [PENDING] until the VM is stopped and started, as on a real node. `kvm`
starts no machine: it only is a process with QEMU's arguments.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote, unquote

CONFIGS = Path("/etc/pve/qemu-server")
MAPPING = Path("/etc/pve/mapping/pci.cfg")
PIDS = Path("/run/qemu-server")
NODE = socket.gethostname()
LABEL = "a stand-in of the Peerlane lab, not Proxmox VE"
# The PCI functions that this node pretends to have; the lab host's own lspci knows nothing of them.
DEVICES = json.loads(Path(__file__).resolve().with_name("pci.json").read_text(encoding="utf-8"))
# Settings that a running VM takes at once; all others wait in [PENDING].
LIVE = {"description", "name", "onboot", "tags", "startup", "protection", "cpuunits"}
KNOWN = re.compile(
    r"(agent|args|affinity|balloon|bios|boot|cores|cpu|cpuunits|description|efidisk0|hookscript|hostpci\d+|hotplug"
    r"|hugepages|ide\d|keephugepages|kvm|machine|memory|meta|name|net\d+|numa\d*|onboot|ostype|protection|scsi\d+|scsihw"
    r"|serial\d|smbios1|sockets|startup|tablet|tags|tpmstate0|vcpus|vga|vmgenid)"
)
VERSIONS = {
    "proxmox-ve": "9.1.0",
    "pve-manager": "9.1.4",
    "qemu-server": "9.1.4",
    "pve-qemu-kvm": "10.1.2-4",
    "pve-edk2-firmware": "4.2025.05-2",
}


class Config:
    """One VM's file: description, active settings, [PENDING], and the snapshot sections as they are."""

    def __init__(self, vmid: str) -> None:
        self.vmid = vmid
        self.path = CONFIGS / f"{vmid}.conf"
        if not re.fullmatch(r"[1-9][0-9]{2,8}", vmid):
            fail(f"400 Parameter verification failed.\nvmid: type check ('integer') failed - got '{vmid}'")
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            fail(f"Configuration file 'nodes/{NODE}/qemu-server/{vmid}.conf' does not exist")
        head, *sections = re.split(r"(?m)^(?=\[)", text)
        lines = head.splitlines()
        self.description = [line for line in lines if line.startswith("#")]
        self.active = settings(lines)
        self.pending: dict[str, str] = {}
        self.others = []
        for section in sections:
            if section.startswith("[PENDING]"):
                self.pending = settings(section.splitlines())
            else:
                self.others.append(section.strip())

    @property
    def doomed(self) -> set[str]:
        """The settings that wait for their removal."""
        return set(re.split(r"[,;\s]+", self.pending.get("delete", ""))) - {""}

    def merged(self) -> dict[str, str]:
        """Return the settings as the next start will have them."""
        kept = {key: value for key, value in self.active.items() if key not in self.doomed}
        return {**kept, **{key: value for key, value in self.pending.items() if key != "delete"}}

    def write(self) -> None:
        """Write the file in one step."""
        parts = ["\n".join([*self.description, *(f"{key}: {self.active[key]}" for key in sorted(self.active))])]
        if self.pending:
            parts.append("\n".join(["[PENDING]", *(f"{key}: {self.pending[key]}" for key in sorted(self.pending))]))
        aside = self.path.with_name(f".{self.path.name}.new")
        aside.write_text("\n\n".join(parts + self.others) + "\n", encoding="utf-8")
        aside.chmod(0o640)
        aside.replace(self.path)

    def running_pid(self) -> int | None:
        """Return the process id of the VM's stand-in."""
        try:
            pid = int((PIDS / f"{self.vmid}.pid").read_text())
            os.kill(pid, 0)
        except (OSError, ValueError):
            return None
        return pid


def settings(lines: list[str]) -> dict[str, str]:
    """Read `key: value` lines; the last of two equal keys counts."""
    found = {}
    for line in lines:
        if match := re.match(r"([a-z][a-z0-9_-]*):\s*(.*?)\s*$", line):
            found[match[1]] = match[2]
    return found


def fail(message: str, code: int = 2) -> NoReturn:
    """End with a message on stderr."""
    print(message, file=sys.stderr)
    sys.exit(code)


def options(value: str, first: str) -> dict[str, str]:
    """Read a comma list; an element without `=` is the value of `first`."""
    pairs = (element.partition("=") for element in value.split(",") if element)
    return {key if equals else first: rest if equals else key for key, equals, rest in pairs}


def resolve(host: dict[str, str]) -> str:
    """Return the PCI address of a hostpci setting, through the node's mapping where it names one."""
    if "mapping" not in host:
        return host["host"]
    section = ""
    for line in MAPPING.read_text(encoding="utf-8").splitlines():
        if line and not line[0].isspace():
            section = line.strip()
        elif section == host["mapping"] and line.split()[0] == "map":
            entry = options(line.split(None, 1)[1], "path")
            if entry.get("node") == NODE:
                return entry["path"]
    fail(f"PCI device mapping not found for '{host['mapping']}'", 255)


def qemu_arguments(vmid: str, config: dict[str, str]) -> list[str]:
    """Return the arguments that a start with these settings gives, the part of them that Peerlane looks at."""
    memory = options(config.get("memory", "512"), "current")["current"]
    cores, sockets = config.get("cores", "1"), config.get("sockets", "1")
    cpu = options(config.get("cpu", "kvm64"), "cputype")
    machine = options(config.get("machine", "pc"), "type")["type"]
    words = ["/usr/bin/kvm", "-id", vmid, "-name", f"{config.get('name', 'VM' + vmid)},debug-threads=on"]
    words += ["-pidfile", f"/var/run/qemu-server/{vmid}.pid", "-daemonize"]
    words += [
        "-smp",
        f"{int(cores) * int(sockets)},sockets={sockets},cores={cores},maxcpus={int(cores) * int(sockets)}",
    ]
    flags = [cpu["cputype"], *(cpu.get("flags", "").replace(";", ",").split(",") if "flags" in cpu else [])]
    if cpu.get("hidden") == "1":
        flags.append("kvm=off")
    if "phys-bits" in cpu:
        flags.append("host-phys-bits=true" if cpu["phys-bits"] == "host" else f"phys-bits={cpu['phys-bits']}")
    words += ["-cpu", ",".join([*flags, "+kvm_pv_eoi", "+kvm_pv_unhalt"]), "-m", memory]
    express = machine.startswith(("q35", "pc-q35"))
    for number in range(16):
        if f"hostpci{number}" not in config:
            continue
        host = options(config[f"hostpci{number}"], "host")
        address = resolve(host)
        address = address if address.count(":") == 2 else f"0000:{address}"
        functions = [device["id"] for device in DEVICES if device["id"] == address or device["id"][:-2] == address]
        if not functions:
            fail(f"no PCI device found for '{address}'", 255)
        bus = (
            f"ich9-pcie-port-{number + 1},addr=0x0"
            if host.get("pcie") == "1" and express
            else f"pci.0,addr={16 + number:#x}"
        )
        for index, function in enumerate(functions):
            several = len(functions) > 1
            suffix, place = (f".{index}", f"{bus}.{index}") if several else ("", bus)
            device = f"vfio-pci,host={function},id=hostpci{number}{suffix},bus={place}"
            words += ["-device", device + (",multifunction=on" if several and index == 0 else "")]
    if config.get("balloon") != "0":
        words += ["-device", "virtio-balloon-pci,id=balloon0,bus=pci.0,addr=0x3,free-page-reporting=on"]
    words += ["-machine", f"type={'q35' if machine == 'q35' else machine}+pve0"]
    return words + shlex.split(config.get("args", ""))


def qm(words: list[str]) -> None:
    """Do what a qm command line says."""
    commands = {
        "list": qm_list,
        "config": qm_config,
        "pending": qm_pending,
        "showcmd": qm_showcmd,
        "status": qm_status,
        "set": qm_set,
        "start": qm_start,
        "stop": qm_stop,
        "shutdown": qm_stop,
        "startall": qm_startall,
    }
    if not words or words[0] in ("help", "--help", "-h"):
        print(f"SIMULATED qm: {LABEL}\nUSAGE: qm {'|'.join(commands)} [VMID] [OPTIONS]")
        return
    if words[0] not in commands:
        fail(f"ERROR: unknown command 'qm {words[0]}' (SIMULATED qm knows: {' '.join(commands)})")
    if words[0] not in ("list", "startall") and len(words) < 2:
        fail(f"400 not enough arguments\nqm {words[0]} <vmid> [OPTIONS]")
    commands[words[0]](words[1:])


def qm_list(_: list[str]) -> None:
    """Print the table of VMs."""
    print(f"{'VMID':>10} {'NAME':<20} {'STATUS':<10} {'MEM(MB)':<10} {'BOOTDISK(GB)':>12} {'PID':<10}")
    for path in sorted(CONFIGS.glob("*.conf"), key=lambda item: int(item.stem)):
        config = Config(path.stem)
        pid = config.running_pid()
        state = "running" if pid else "stopped"
        name, memory = config.active.get("name", ""), config.active.get("memory", "512")
        print(f"{path.stem:>10} {name:<20} {state:<10} {memory:<10} {'256.00':>12} {pid or 0:<10}")


def qm_config(words: list[str]) -> None:
    """Print the settings: with what is pending, or with --current those of the running VM."""
    config = Config(words[0])
    shown = config.active if "--current" in words else config.merged()
    if config.description:
        shown = {**shown, "description": quote(unquote("\n".join(line[1:] for line in config.description)) + "\n")}
    for key in sorted(shown):
        print(f"{key}: {shown[key]}")


def qm_pending(words: list[str]) -> None:
    """Print current, new and doomed settings."""
    config = Config(words[0])
    for key in sorted({*config.active, *config.pending} - {"delete"}):
        if key in config.active:
            print(f"{'del' if key in config.doomed else 'cur'} {key}: {config.active[key]}")
        if key in config.pending:
            print(f"new {key}: {config.pending[key]}")


def qm_showcmd(words: list[str]) -> None:
    """Print the command line of the next start."""
    config = Config(words[0])
    line = qemu_arguments(words[0], config.merged())
    if "--pretty" in words:
        print(re.sub(r" (?=-[a-z])", " \\\\\n  ", shlex.join(line)))
    else:
        print(shlex.join(line))


def qm_status(words: list[str]) -> None:
    """Print whether a VM runs."""
    pid = Config(words[0]).running_pid()
    print(f"status: {'running' if pid else 'stopped'}")
    if "--verbose" in words and pid:
        print(f"pid: {pid}\nrunning-machine: pc-q35-10.1+pve0\nrunning-qemu: 10.1.2")


def qm_set(words: list[str]) -> None:
    """Change settings: at once if the VM is stopped or takes them live, else into [PENDING]."""
    config = Config(words[0])
    running = config.running_pid() is not None
    changes: dict[str, str | None] = {}
    rest = words[1:]
    while rest:
        option, rest = rest[0], rest[1:]
        key, equals, value = option.lstrip("-").partition("=")
        if not option.startswith("-"):
            fail(f"400 too many arguments\n{option}")
        if not equals:
            if not rest:
                fail(f"400 unable to parse option\nOption {key} requires an argument")
            value, rest = rest[0], rest[1:]
        if key == "delete":
            changes.update(dict.fromkeys(re.split(r"[,;\s]+", value)))
        elif KNOWN.fullmatch(key):
            changes[key] = value
        else:
            fail(f"Unknown option: {key}\n400 unable to parse option")
    for key, wanted in changes.items():
        doomed = config.doomed - {key}
        config.pending.pop(key, None)
        if not running or key in LIVE:
            config.active.pop(key, None)
            if wanted is not None:
                config.active[key] = wanted
        elif wanted is None:
            doomed |= {key} & set(config.active)
        elif config.active.get(key) != wanted:
            config.pending[key] = wanted
        config.pending.pop("delete", None)
        if doomed:
            config.pending["delete"] = ",".join(sorted(doomed))
    shown = " ".join(f"-delete {key}" if wanted is None else f"-{key} {wanted}" for key, wanted in changes.items())
    print(f"update VM {words[0]}: {shown}")
    config.write()


def qm_start(words: list[str]) -> None:
    """Apply what is pending, and run the stand-in with the arguments of the new settings."""
    config = Config(words[0])
    if config.running_pid() is not None:
        fail(f"VM {words[0]} already running", 255)
    config.active, config.pending = config.merged(), {}
    arguments = qemu_arguments(words[0], config.active)
    config.write()
    PIDS.mkdir(exist_ok=True)
    unit = f"peerlane-lab-vm-{words[0]}"
    subprocess.run(["systemd-run", "--quiet", "--collect", f"--unit={unit}", *arguments], check=True)
    show = ["systemctl", "show", "--property=MainPID", "--value", unit]
    (PIDS / f"{words[0]}.pid").write_text(subprocess.run(show, check=True, capture_output=True, text=True).stdout)


def qm_stop(words: list[str]) -> None:
    """End the stand-in."""
    if Config(words[0]).running_pid() is not None:
        subprocess.run(["systemctl", "stop", f"peerlane-lab-vm-{words[0]}"], check=True)
    (PIDS / f"{words[0]}.pid").unlink(missing_ok=True)


def qm_startall(_: list[str]) -> None:
    """Start the VMs that are marked `onboot: 1`."""
    for path in sorted(CONFIGS.glob("*.conf")):
        config = Config(path.stem)
        if config.active.get("onboot") == "1" and config.running_pid() is None:
            qm_start([path.stem])


def pvesh(words: list[str]) -> None:
    """Answer the few API paths that Peerlane reads."""
    if len(words) < 2 or words[0] != "get":
        print(f"SIMULATED pvesh: {LABEL}\nUSAGE: pvesh get PATH [--output-format json]")
        sys.exit(0 if words[:1] in ([], ["help"], ["--help"]) else 2)
    path = words[1].rstrip("/").replace("/nodes/localhost", f"/nodes/{NODE}")
    answer: object
    if path == "/version":
        answer = {"version": VERSIONS["pve-manager"], "release": "9.1", "repoid": "simulated"}
    elif path == f"/nodes/{NODE}/hardware/pci":
        answer = DEVICES
    elif path == f"/nodes/{NODE}/qemu":
        ids = sorted(int(item.stem) for item in CONFIGS.glob("*.conf"))
        states = {number: "running" if Config(str(number)).running_pid() else "stopped" for number in ids}
        answer = [{"vmid": number, "status": states[number]} for number in ids]
    elif match := re.fullmatch(rf"/nodes/{re.escape(NODE)}/qemu/(\d+)/config", path):
        answer = Config(match[1]).merged()
    else:
        fail(f"No '{words[0]}' handler defined for '{words[1]}' (SIMULATED pvesh)")
    print(json.dumps(answer, indent=3, sort_keys=True))


def pveversion(words: list[str]) -> None:
    """Print the pretended versions, with the kernel that really runs."""
    if set(words) & {"--help", "-h", "help"}:
        print(f"SIMULATED pveversion: {LABEL}\nUSAGE: pveversion [-v]")
    elif set(words) & {"-v", "--verbose"}:
        for package, version in VERSIONS.items():
            kernel = f" (running kernel: {platform.release()})" if package == "proxmox-ve" else ""
            print(f"{package}: {version}{kernel}")
    else:
        print(f"pve-manager/{VERSIONS['pve-manager']}/simulated (running kernel: {platform.release()})")


def kvm(words: list[str]) -> None:
    """Print QEMU's version, or be a process with QEMU's arguments until it is told to end."""
    if not words or words[0] in ("-h", "-help", "--help"):
        print(f"SIMULATED kvm: {LABEL}\nUSAGE: kvm --version | kvm QEMU-ARGUMENTS (waits, runs no machine)")
    elif words[0] in ("-version", "--version"):
        package = VERSIONS["pve-qemu-kvm"]
        print(f"QEMU emulator version {package.partition('-')[0]} (pve-qemu-kvm_{package})")
    else:
        hide_interpreter()
        signal.sigwait({signal.SIGTERM, signal.SIGINT})


def hide_interpreter() -> None:
    """Take the interpreter out of /proc/PID/cmdline, so that it reads as QEMU's does (proc(5), fields 48 and 49)."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    line = ctypes.string_at(start, end - start)
    ctypes.memmove(start, line.partition(b"\0")[2].ljust(len(line), b"\0"), len(line))


if __name__ == "__main__":
    {"qm": qm, "pvesh": pvesh, "pveversion": pveversion, "kvm": kvm}[Path(sys.argv[0]).name](sys.argv[1:])
