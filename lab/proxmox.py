"""Proxmox VE's files and simulated tools for a lab host, labelled as such everywhere: a container, or a VM."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).with_name("simulated")
SHARE = "usr/share/peerlane-lab"
MARKER = "etc/peerlane-lab-simulated"
NOTICE = (
    "SIMULATED Proxmox VE node of the Peerlane lab: the files under /etc/pve have Proxmox's format; qm, pvesh, "
    "pveversion and kvm are stand-ins. Nothing here proves anything about Proxmox itself.\n"
)
TOOLS = ("usr/sbin/qm", "usr/bin/pvesh", "usr/bin/pveversion", "usr/bin/kvm")
STARTER = """\
[Unit]
Description=SIMULATED start of the VMs that are marked onboot
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/sbin/qm startall
[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True)
class Passed:
    """A GPU that a simulated VM config passes through: PCI address, NVIDIA's device id, IOMMU group."""

    address: str
    device: str
    group: int


def mapping_text(node: str) -> str:
    """Return /etc/pve/mapping/pci.cfg for a node of that name."""
    return "".join(
        f"gpu{number}\n"
        f"\tmap id=10de:2bb1,iommugroup={group},node={node},path=0000:{bus}:00.0,subsystem-id=10de:204b\n\n"
        for number, (bus, group) in enumerate((("01", 14), ("21", 27), ("41", 41), ("61", 55)))
    )


def furnish(root: Path, node: str) -> None:
    """Put files, tools and labels into the fresh disk of a container named `node`; the GPUs are made up."""
    configs = {file.name: file.read_text(encoding="utf-8") for file in SOURCES.glob("*.conf")}
    devices = (SOURCES / "pci.json").read_text(encoding="utf-8")
    _furnish(root, node, configs, mapping_text(node), devices, NOTICE)


def archive(node: str, passed: Sequence[Passed], notice: str) -> bytes:
    """Return a tar archive of the same for a virtual machine named `node`; the GPUs are those of its own bus."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("etc/systemd/system", "usr/sbin", "usr/bin"):
            (root / name).mkdir(parents=True)
        _furnish(root, node, {"101.conf": config_text(passed)}, "", devices_text(passed), notice + NOTICE)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            # Without folders, so that those of the guest keep their rights.
            for path in sorted(path for path in root.rglob("*") if path.is_symlink() or path.is_file()):
                tar.add(path, arcname=str(path.relative_to(root)))
        return packed.getvalue()


def sources() -> str:
    """Return all that an archive is made of, beside the GPUs that it names."""
    return config_text([]) + (SOURCES / "proxmox_tools.py").read_text(encoding="utf-8") + NOTICE + STARTER


def config_text(passed: Sequence[Passed]) -> str:
    """Return the config of VM 101, with these GPUs in the place of the made-up ones."""
    lines = (SOURCES / "101.conf").read_text(encoding="utf-8").splitlines()[1:]
    kept = [line for line in lines if not line.startswith(("hostpci", "args:", "cores:", "memory:"))]
    kept += ["cores: 1", "memory: 512"]  # no more than the lab host has
    clique = " ".join(f"-set device.hostpci{number}.x-nv-gpudirect-clique=0" for number in range(len(passed)))
    kept.append(f"args: {clique}")
    kept += [f"hostpci{number}: {gpu.address},pcie=1" for number, gpu in enumerate(passed)]
    head = "#SIMULATED GPUs, set up for peer-to-peer; written for the Peerlane lab"
    return "\n".join([head, *sorted(kept)]) + "\n"


def devices_text(passed: Sequence[Passed]) -> str:
    """Return what the simulated `pvesh` knows of the node's PCI functions."""
    entries = [
        {
            "id": gpu.address,
            "class": "0x030200",
            "vendor": "0x10de",
            "device": f"0x{gpu.device}",
            "subsystem_vendor": "0x10de",
            "subsystem_device": "0x204b",
            "vendor_name": "NVIDIA Corporation",
            "iommugroup": gpu.group,
        }
        for gpu in passed
    ]
    return json.dumps(entries, indent=1) + "\n"


def rename_lines(before: str, node: str) -> list[str]:
    """Return shell lines that give a furnished node another name; a second time they change nothing."""
    nodes = "/etc/pve/nodes"
    return [
        f"[ ! -d {nodes}/{before} ] || mv {nodes}/{before} {nodes}/{node}",
        f"ln -sfn nodes/{node} /etc/pve/local",
        f"ln -sfn nodes/{node}/qemu-server /etc/pve/qemu-server",
    ]


def _furnish(root: Path, node: str, configs: Mapping[str, str], mapping: str, devices: str, notice: str) -> None:
    for name in (MARKER, "etc/motd"):
        (root / name).write_text(notice, encoding="utf-8")
    share = root / SHARE
    share.mkdir(parents=True)
    shutil.copyfile(SOURCES / "proxmox_tools.py", share / "proxmox_tools.py")
    (share / "proxmox_tools.py").chmod(0o755)
    (share / "pci.json").write_text(devices, encoding="utf-8")
    for tool in TOOLS:
        (root / tool).symlink_to(f"/{SHARE}/proxmox_tools.py")
    node_folder = root / "etc/pve/nodes" / node
    (node_folder / "qemu-server").mkdir(parents=True)
    (root / "etc/pve/local").symlink_to(f"nodes/{node}")
    (root / "etc/pve/qemu-server").symlink_to(f"nodes/{node}/qemu-server")
    for name, text in configs.items():
        (node_folder / "qemu-server" / name).write_text(text, encoding="utf-8")
        (node_folder / "qemu-server" / name).chmod(0o640)
    (root / "etc/pve/mapping").mkdir()
    (root / "etc/pve/mapping/pci.cfg").write_text(mapping, encoding="utf-8")
    units = root / "etc/systemd/system"
    (units / "peerlane-lab-guests.service").write_text(STARTER, encoding="utf-8")
    (units / "multi-user.target.wants").mkdir(exist_ok=True)
    (units / "multi-user.target.wants/peerlane-lab-guests.service").symlink_to("../peerlane-lab-guests.service")
