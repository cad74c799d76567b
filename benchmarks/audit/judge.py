"""How many recorded hosts a second one core judges, start-up included, and what memory a large fleet takes.

    python benchmarks/audit/judge.py                     # 1,000 hosts
    python benchmarks/audit/judge.py --memory 10000      # and the memory that 10,000 hosts take
    python benchmarks/audit/judge.py --log-lines 2000    # the same hosts with a longer kernel log each

The hosts are copies of ``docs/examples/eight-gpu-guest``: guests with eight GPUs, the hypervisor of each, and the same
board without a hypervisor. Each copy has its own names, UUIDs, network addresses, time stamps, temperatures, power,
memory in use, link states and one of twelve faults or none. What is equal on the machines of a real fleet stays equal:
the CPU, the operating system, packages, modprobe.d. The figure is that of the real command line,
``peerlane audit --from DIR --format json -o FILE``, by the CPU time of its process: the wall time of a machine with
other work on it says little. A recorded host of this kind is about 40 KiB of text; logs of real hosts are longer, and
cost more.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "eight-gpu-guest"
GPUS = 8
# Of ten hosts: four guests, their four hypervisors, two without a hypervisor.
PAIRS_OF_TEN = 4


@dataclass
class Recorded:
    """One snapshot folder: its manifest and the text of each source."""

    manifest: dict[str, object]
    texts: dict[str, str] = field(default_factory=dict)

    def copy(self) -> Recorded:
        """Return a copy that can be changed."""
        return Recorded(json.loads(json.dumps(self.manifest)), dict(self.texts))

    def edit(self, source: str, pattern: str, by: str | Callable[[re.Match[str]], str], count: int = 0) -> None:
        """Change the text of a source; a change that finds nothing is a mistake of this file."""
        self.texts[source], changed = re.subn(pattern, by, self.texts[source], count=count, flags=re.MULTILINE)
        if not changed:
            raise ValueError(f"{source}: nothing matches {pattern}")

    def save(self, folder: Path) -> None:
        """Write the snapshot folder."""
        folder.mkdir(parents=True)
        for source, text in self.texts.items():
            (folder / f"{source}.txt").write_text(text)
        (folder / "manifest.json").write_text(json.dumps(self.manifest, indent=1, sort_keys=True) + "\n")


def load(folder: Path) -> Recorded:
    """Read one of the recorded hosts."""
    manifest = json.loads((folder / "manifest.json").read_text())
    rows = [row for row in manifest["evidence"] if "file" in row]
    return Recorded(manifest, {row["source"]: (folder / row["file"]).read_text() for row in rows})


def bare_metal(guest: Recorded, node: Recorded) -> Recorded:
    """Return the board of the hypervisor with the guest's system on it: the driver owns the GPUs."""
    host = guest.copy()
    buses = [f"{0x20 * number + 1:02x}" for number in range(GPUS)]
    for source in ("nvidia_smi", "nvidia_smi.q", "proc.driver.nvidia.gpus"):
        for number in reversed(range(GPUS)):
            host.edit(source, rf"0000:0{number + 1}:00\.0", f"0000:{buses[number]}:00.0")
    for number in reversed(range(GPUS)):
        host.edit("nvidia_smi.q", rf"( Bus +: 0x)0{number + 1}$", rf"\g<1>{buses[number].upper()}")
    for source in ("sysfs.pci", "sysfs.iommu", "lspci.vvv"):
        host.texts[source] = node.texts[source].replace("vfio-pci", "nvidia").replace("DMA-FQ", "identity")
    host.edit("nvidia_smi.topo_p2p_r", r"\bNS\b(?!\s+=)", "OK")
    host.edit("nvidia_smi.topo_p2p_w", r"\bNS\b(?!\s+=)", "OK")
    host.edit("nvidia_smi.topo_m", r"PHB(?!\s+=)", "NODE")
    host.edit("kernel_log", r".*Hypervisor detected.*\n", "[    0.310050] AMD-Vi: Interrupt remapping enabled\n")
    host.edit("proc.cpuinfo", " hypervisor", " svm")
    host.texts["detect_virt.vm"] = "none\n"
    host.texts["dmi"] = node.texts["dmi"] + "product_uuid: 0a1b2c3d-1111-4222-8333-444455556666\n"
    rows = host.manifest["evidence"]
    more = node.manifest["evidence"]
    assert isinstance(rows, list) and isinstance(more, list)
    rows += [row for row in more if row["source"] == "lspci.vvv"]
    return host


# --- what differs between the copies --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """What one GPU does: nothing, or it serves a model."""

    busy: bool
    watts: float
    celsius: int
    percent: int
    used_mib: int
    pid: int


def _load(dice: random.Random) -> Load:
    if dice.random() < 0.5:
        return Load(False, dice.uniform(28, 40), dice.randrange(28, 36), 0, 0, 0)
    used = dice.randrange(20000, 90000)
    return Load(
        True, dice.uniform(250, 590), dice.randrange(45, 84), dice.randrange(30, 101), used, dice.getrandbits(20)
    )


def own_driver_texts(host: Recorded, dice: random.Random) -> None:
    """Give the GPUs of a host with a driver their own UUIDs, load and time."""
    stamp = f"{dice.randrange(24):02d}:{dice.randrange(60):02d}:{dice.randrange(60):02d}"
    uuids = [_uuid(dice) for _ in range(GPUS)]
    for source in ("nvidia_smi.L", "nvidia_smi.q", "proc.driver.nvidia.gpus"):
        host.edit(
            source, r"GPU-0000000([1-8])-0000-4000-8000-00000000000\d", lambda hit: f"GPU-{uuids[int(hit[1]) - 1]}"
        )
    host.edit("nvidia_smi.q", r"09:14:00", stamp)
    host.edit("nvidia_smi", r"09:14:00", stamp)
    loads = [_load(dice) for _ in range(GPUS)]

    def each(source: str, pattern: str, shown: Callable[[Load], str]) -> None:
        told = iter(loads)
        host.edit(source, pattern, lambda _: shown(next(told)))

    each("nvidia_smi.q", r"32\.11 W", lambda one: f"{one.watts:.2f} W")
    each("nvidia_smi.q", r": P8$", lambda one: ": P0" if one.busy else ": P8")
    each("nvidia_smi.q", r": 0 MiB\n( +Free +): 97256 MiB", _memory_use)
    each("nvidia_smi.q", r"^    Processes +: None$", _process)
    each(
        "nvidia_smi",
        r"31C    P8             32W /  600W \|       0MiB",
        lambda one: (
            f"{one.celsius}C    P{0 if one.busy else 8}            {one.watts:3.0f}W /  600W |   {one.used_mib:5}MiB"
        ),
    )
    each("nvidia_smi", r"  0%(?= +Default)", lambda one: f"{one.percent:3d}%")
    rows = "".join(
        f"|  {at:3}   N/A  N/A  {one.pid:9}      C   /opt/engine/bin/python                  {one.used_mib:5}MiB |\n"
        for at, one in enumerate(loads)
        if one.busy
    )
    if rows:
        host.edit("nvidia_smi", r"\|  No running processes found.*\n", rows)
    speeds = iter(loads)
    _links(host, lambda: "32.0 GT/s PCIe" if next(speeds).busy else "2.5 GT/s PCIe")


def _memory_use(one: Load) -> str:
    return f": {one.used_mib} MiB\n        {'Free':<46} : {97256 - one.used_mib} MiB"


def _process(one: Load) -> str:
    if not one.busy:
        return f"    {'Processes':<50} : None"
    rows = (("Process ID", str(one.pid)), ("    Type", "C"), ("    Name", "/opt/engine/bin/python"))
    told = (*rows, ("    Used GPU Memory", f"{one.used_mib} MiB"))
    return "    Processes\n" + "\n".join(f"        {name:<46} : {given}" for name, given in told)


def _links(host: Recorded, speed: Callable[[], str]) -> None:
    """Let each GPU's link be as fast as its load wants it."""
    host.edit(
        "sysfs.pci",
        r"(0302\w\w\nrevision: \S+\nnuma_node: \S+\ncurrent_link_speed: ).*",
        lambda hit: hit[1] + speed(),
    )


def _uuid(dice: random.Random) -> str:
    digits = f"{dice.getrandbits(128):032x}"
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-8{digits[17:20]}-{digits[20:]}"


def _time(host: Recorded, dice: random.Random, more_lines: int) -> None:
    """Give a host its own boot times, ``more_lines`` further kernel messages, and its own milliseconds."""
    host.manifest["collected_at"] = f"2026-11-{dice.randrange(1, 29):02d}T{dice.randrange(24):02d}:14:02Z"
    rows = host.manifest["evidence"]
    assert isinstance(rows, list)
    for row in rows:
        row["elapsed_ms"] = dice.randrange(1, 60)
    host.edit("kernel_log", r"^\[ +([1-9]\d*)\.\d+\]", lambda hit: f"[{hit[1]:>5}.{dice.randrange(10**6):06d}]")
    lines = (
        f"[{number / 50 + 10:12.6f}] pci 0000:{dice.randrange(256):02x}:{dice.randrange(32):02x}.0: BAR 0 "
        f"[mem {dice.getrandbits(40):#014x}-{dice.getrandbits(40):#014x} 64bit pref]: assigned\n"
        for number in range(more_lines)
    )
    host.texts["kernel_log"] += "".join(lines)


def _say(host: Recorded, *lines: str) -> None:
    host.texts["kernel_log"] += "".join(f"[ 9000.{number:06d}] {line}\n" for number, line in enumerate(lines))


def _nothing(host: Recorded, dice: random.Random) -> None:
    """Leave the host as it is."""


def _xid(host: Recorded, dice: random.Random) -> None:
    bus = dice.choice(re.findall(r"GPU 0000(\S+:\S+:\S+)\.0$", host.texts["nvidia_smi.q"], re.MULTILINE))
    _say(host, f"NVRM: Xid (PCI:{bus}): {dice.choice((31, 48, 79, 94, 119))}, pid={dice.randrange(10**5)}, name=python")


def _narrow(host: Recorded, dice: random.Random) -> None:
    at = dice.randrange(GPUS)
    hits = list(re.finditer(r"(?<=0302\w\w\n)(?:.+\n){3}current_link_width: 16", host.texts["sysfs.pci"]))
    text = host.texts["sysfs.pci"]
    host.texts["sysfs.pci"] = f"{text[: hits[at].end() - 2]}8{text[hits[at].end() :]}"


def _old_driver(host: Recorded, dice: random.Random) -> None:
    for source in ("nvidia_smi", "nvidia_smi.q", "proc.driver.nvidia.version", "modinfo.nvidia"):
        host.edit(source, r"580\.95\.05", "580.82.09")


def _power(host: Recorded, dice: random.Random) -> None:
    host.edit("nvidia_smi.q", r"(Current Power Limit +: )600", rf"\g<1>{dice.randrange(300, 580, 10)}", count=2)


def _persistence(host: Recorded, dice: random.Random) -> None:
    host.edit("nvidia_smi.q", r"(Persistence Mode +: )Enabled", r"\g<1>Disabled", count=dice.randrange(1, GPUS))


def _memory(host: Recorded, dice: random.Random) -> None:
    host.edit("nvidia_smi.q", r"97887 MiB", f"{dice.randrange(90000, 97000)} MiB", count=1)


def _aer(host: Recorded, dice: random.Random) -> None:
    port = dice.choice(re.findall(r"^\[(\S+:01\.1|0000:00:1c\.0)\]$", host.texts["sysfs.pci"], re.MULTILINE))
    head = f"pcieport {port}: "
    for _ in range(dice.randrange(1, 6)):
        _say(
            host,
            f"{head}AER: Correctable error message received from {port}",
            f"{head}PCIe Bus Error: severity=Correctable, type=Physical Layer, (Receiver ID)",
            f"{head}  device [1022:14ab] error status/mask=00000001/0000e000",
            f"{head}   [ 0] RxErr                  (First)",
        )


def _conf(pattern: str, by: str) -> Callable[[Recorded, random.Random], None]:
    def change(host: Recorded, dice: random.Random) -> None:
        host.edit("pve.conf.101", pattern, by)

    return change


def _pending(host: Recorded, dice: random.Random) -> None:
    host.texts["pve.qm_pending"] = host.texts["pve.qm_pending"].replace("cur cpu: host,hidden=1", "new cpu: host")


def _acs(host: Recorded, dice: random.Random) -> None:
    host.edit("lspci.vvv", r"(ACSCtl:\tSrcValid)\+", r"\1-", count=dice.randrange(1, GPUS))


FAULTS_OF_DRIVER = (_nothing, _xid, _narrow, _old_driver, _power, _persistence, _memory, _aer)
FAULTS_OF_NODE = (
    _nothing,
    _narrow,
    _aer,
    _pending,
    _acs,
    _conf(r"host,hidden=1", "host"),
    _conf(r"^(hostpci2: .*)", r"\1,x-vga=1"),
    _conf(r"^machine: q35", "machine: pc-i440fx-9.0"),
)


def copies(count: int, more_lines: int) -> Iterator[tuple[str, Recorded]]:
    """Yield ``count`` varied hosts with their names, always the same ones."""
    dice = random.Random(3)  # noqa: S311 - equal fleets for equal figures
    guest, node = load(EXAMPLE / "llm-guest"), load(EXAMPLE / "pve-node")
    metal = bare_metal(guest, node)
    for number in range(count):
        kind = number % 10
        if kind >= 2 * PAIRS_OF_TEN:
            name, host = f"metal-{number:05d}", metal.copy()
            own_driver_texts(host, dice)
            host.edit("dmi", r"product_uuid: .*", f"product_uuid: {_uuid(dice)}")
            dice.choice(FAULTS_OF_DRIVER)(host, dice)
        elif kind % 2 == 0:
            name, host, uuid = f"guest-{number:05d}", guest.copy(), _uuid(dice)
            own_driver_texts(host, dice)
            host.edit("dmi", r"product_uuid: .*", f"product_uuid: {uuid}")
            dice.choice(FAULTS_OF_DRIVER)(host, dice)
            host.edit("uname", "llm-guest", name)
            lives_in = (name, uuid)
        else:
            name, host = f"node-{number:05d}", node.copy()
            vm, uuid = lives_in
            dice.choice(FAULTS_OF_NODE)(host, dice)
            host.edit("pve.conf.101", r"uuid=0a1b2c3d-1111\S+", f"uuid={uuid}")
            host.edit("pve.conf.101", r"BC:24:11:00:00:01", f"BC:24:11:{number >> 8:02X}:{number & 255:02X}:01")
            host.edit("pve.conf.101", r"vmgenid: .*", f"vmgenid: {_uuid(dice)}")
            host.edit("pve.conf.101", r"ctime=1758000000", f"ctime={1758000000 + dice.randrange(10**7)}")
            host.edit("pve.conf.101", r"llm-guest", vm)
            host.edit("pve.running", r"llm-guest", vm)
            host.edit("pve.running", r"pid 41870", f"pid {dice.randrange(2000, 10**6)}")
            host.edit("uname", "pve-node", name)
            _links(host, lambda: dice.choice(("2.5 GT/s PCIe", "32.0 GT/s PCIe")))
        _time(host, dice, more_lines)
        host.manifest["host"] = name
        yield name, host


# --- running it -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a finished process used."""

    cpu_s: float
    wall_s: float
    peak_mib: float


def run(*argv: str) -> Run:
    """Run a command that must end with 0."""
    started = time.monotonic()
    process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with {process.returncode}")
    return Run(used.ru_utime + used.ru_stime, time.monotonic() - started, used.ru_maxrss / 1024)


def audit(folder: Path, work: Path, kind: str) -> tuple[Run, int]:
    """Audit a fleet; return what that took, and the bytes of the result."""
    result = work / f"result.{kind}"
    argv = (sys.executable, "-m", "peerlane", "audit", "--from", str(folder), "--fail-on", "never")
    used = run(*argv, "--format", kind, "-o", str(result))
    return used, result.stat().st_size


def made(folder: Path, count: int, more_lines: int) -> int:
    """Write a fleet; return its bytes of evidence."""
    size = 0
    for name, host in copies(count, more_lines):
        host.save(folder / name)
        size += sum(map(len, host.texts.values()))
    return size


def main() -> int:
    """Print the figures."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("-n", "--hosts", type=int, default=1000)
    options.add_argument("-r", "--runs", type=int, default=3, help="the best run counts")
    options.add_argument("--memory", type=int, metavar="HOSTS", help="compare the peak memory with that of more hosts")
    options.add_argument("--log-lines", type=int, default=0, help="further kernel messages of each host")
    options.add_argument("--keep", type=Path, metavar="DIR", help="only write the fleet, into this folder")
    args = options.parse_args()
    if args.keep:
        print(f"{made(args.keep, args.hosts, args.log_lines) / 1024 / args.hosts:.0f} KiB of evidence a host")
        return 0
    with tempfile.TemporaryDirectory() as name:
        # As an installation does: compiled modules are kept from one run to the next.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = f"{name}/compiled"
        os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT / "collections")))
        fleet = Path(name) / "fleet"
        size = made(fleet, args.hosts, args.log_lines)
        print(f"{args.hosts} hosts, {size / 1024 / args.hosts:.0f} KiB of evidence each")
        empty = min((run(sys.executable, "-c", "pass") for _ in range(args.runs)), key=lambda one: one.cpu_s)
        one_host = min(audit(EXAMPLE / "llm-guest", Path(name), "json")[0].cpu_s for _ in range(args.runs + 1))
        print(f"python -c pass: {empty.cpu_s * 1000:.0f} ms of CPU, an audit of one host: {one_host * 1000:.0f} ms")
        for kind in ("json", "text"):
            runs = [audit(fleet, Path(name), kind) for _ in range(args.runs)]
            used, result = min(runs, key=lambda one: one[0].cpu_s)
            print(
                f"{kind}: {args.hosts / used.cpu_s:.0f} hosts per second of CPU, {args.hosts / used.wall_s:.0f} by the "
                f"clock, {used.cpu_s / args.hosts / empty.cpu_s:.3f} x python -c pass a host, "
                f"{result / 1024 / args.hosts:.0f} KiB of result a host, at most {used.peak_mib:.0f} MiB of memory"
            )
        if args.memory:
            small, _ = audit(fleet, Path(name), "json")
            more = Path(name) / "more"
            made(more, args.memory, args.log_lines)
            large, result = audit(more, Path(name), "json")
            growth = (large.peak_mib - small.peak_mib) * 1024 / (args.memory - args.hosts)
            print(
                f"json: {args.memory} hosts take {large.peak_mib:.0f} MiB where {args.hosts} take {small.peak_mib:.0f} "
                f"MiB: {growth:.1f} KiB a host beside {result / 1024 / args.memory:.0f} KiB of result"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
