"""Facts as the module ``driver_facts`` returns them, for hosts that never existed."""

from __future__ import annotations

from typing import Any

RELEASES = {
    "trixie": 'ID=debian\nVERSION_ID="13"\n',
    "bookworm": 'ID=debian\nVERSION_ID="12"\n',
    "noble": 'ID=ubuntu\nVERSION_ID="24.04"\n',
    "jammy": 'ID=ubuntu\nVERSION_ID="22.04"\n',
}
DEBIAN = "http://archive.example/debian trixie/contrib amd64 Packages"
NVIDIA = "http://cuda.example/repos  Packages"
UBUNTU = "http://ubuntu.example/ubuntu noble-updates/restricted amd64 Packages"
_RELEASE_LINES = {
    DEBIAN: "v=13.8,o=Debian,a=stable,n=trixie,l=Debian,c=contrib,b=amd64",
    NVIDIA: "o=NVIDIA,l=NVIDIA CUDA,c=",
    UBUNTU: "v=24.04,o=Ubuntu,a=noble-updates,n=noble,l=Ubuntu,c=restricted,b=amd64",
}
BLACKWELL, ADA, PASCAL = "2bb5", "2684", "1b06"


def gpu(device: str, address: str = "0000:01:00.0", driver: str = "") -> dict[str, str]:
    """Return one GPU as the module names it."""
    return {"address": address, "device": device, "driver": driver}


def kernel(release: str, headers: bool = True, running: bool = False) -> dict[str, Any]:
    """Return one kernel as the module names it."""
    return {"release": release, "headers": headers, "running": running}


def policy(*rows: tuple[str, str, str, str]) -> str:
    """Return ``apt-cache policy`` text of rows (package, version, place, installed version or "")."""
    text = ""
    for name in dict.fromkeys(row[0] for row in rows):
        mine = [row for row in rows if row[0] == name]
        installed = next((row[3] for row in mine if row[3]), "")
        text += f"{name}:\n  Installed: {installed or '(none)'}\n  Candidate: {mine[0][1]}\n  Version table:\n"
        for _, version, place, _ in mine:
            mark = " *** " if version == installed else "     "
            text += f"{mark}{version} 500\n        500 {place}\n"
            if version == installed:
                text += "        100 /var/lib/dpkg/status\n"
    return text


def repositories(*places: str, priority: int = 500) -> str:
    """Return ``apt-cache policy`` text without arguments."""
    text = "Package files:\n 100 /var/lib/dpkg/status\n     release a=now\n"
    for place in places:
        text += f" {priority} {place}\n     release {_RELEASE_LINES.get(place, '')}\n     origin archive.example\n"
    return text + "Pinned packages:\n"


def facts(system: str = "trixie", **changes: Any) -> dict[str, Any]:
    """Return the facts of a bare host, changed where asked."""
    plain: dict[str, Any] = {
        "os_release": RELEASES.get(system, system),
        "architecture": "amd64",
        "container": "",
        "gpus": [],
        "kernels": [],
        "packages": "",
        "holds": "",
        "repositories": repositories(),
        "policy": "",
        "asked": [],
        "lists_present": True,
        "dkms_status": "",
        "make_logs": {},
        "audit": "",
        "alternatives": "",
        "secure_boot": False,
        "secure_boot_reason": "",
        "keys": [],
        "loaded_version": "",
        "other_drivers": [],
        "runfile": False,
        "initramfs": True,
    }
    assert not set(changes) - set(plain), "unknown fact"
    return {**plain, **changes}


def nvidia_offers(*versions: str, installed: str = "") -> dict[str, Any]:
    """Return the facts of a host that has NVIDIA's repository with these driver versions."""
    names = ("nvidia-kernel-open-dkms", "nvidia-kernel-dkms", "nvidia-driver-cuda", "nvidia-persistenced")
    rows = [(name, version, NVIDIA, installed) for name in names for version in versions]
    packages = "".join(f"ii \t{name}\t{installed}\n" for name in names if installed)
    return {"repositories": repositories(DEBIAN, NVIDIA), "policy": policy(*rows), "packages": packages}
