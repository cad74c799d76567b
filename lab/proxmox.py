"""Lab hosts of kind `proxmox`: a container with Proxmox VE's files and simulated tools, labelled as such everywhere."""

from __future__ import annotations

import shutil
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


def mapping_text(node: str) -> str:
    """Return /etc/pve/mapping/pci.cfg for a node of that name."""
    return "".join(
        f"gpu{number}\n"
        f"\tmap id=10de:2bb1,iommugroup={group},node={node},path=0000:{bus}:00.0,subsystem-id=10de:204b\n\n"
        for number, (bus, group) in enumerate((("01", 14), ("21", 27), ("41", 41), ("61", 55)))
    )


def furnish(root: Path, node: str) -> None:
    """Put files, tools and labels into the fresh disk of a lab host named `node`."""
    for name in (MARKER, "etc/motd"):
        (root / name).write_text(NOTICE, encoding="utf-8")
    share = root / SHARE
    share.mkdir(parents=True)
    for name in ("proxmox_tools.py", "pci.json"):
        shutil.copyfile(SOURCES / name, share / name)
    (share / "proxmox_tools.py").chmod(0o755)
    for tool in TOOLS:
        (root / tool).symlink_to(f"/{SHARE}/proxmox_tools.py")
    node_folder = root / "etc/pve/nodes" / node
    (node_folder / "qemu-server").mkdir(parents=True)
    (root / "etc/pve/local").symlink_to(f"nodes/{node}")
    (root / "etc/pve/qemu-server").symlink_to(f"nodes/{node}/qemu-server")
    for config in SOURCES.glob("*.conf"):
        shutil.copyfile(config, node_folder / "qemu-server" / config.name)
        (node_folder / "qemu-server" / config.name).chmod(0o640)
    (root / "etc/pve/mapping").mkdir()
    (root / "etc/pve/mapping/pci.cfg").write_text(mapping_text(node), encoding="utf-8")
    units = root / "etc/systemd/system"
    (units / "peerlane-lab-guests.service").write_text(STARTER, encoding="utf-8")
    (units / "multi-user.target.wants").mkdir(exist_ok=True)
    (units / "multi-user.target.wants/peerlane-lab-guests.service").symlink_to("../peerlane-lab-guests.service")
