"""Read what apt and dpkg print (C locale): versions and their origins, simulations, unmet dependencies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# Packages that are, or bring, the driver itself. Not the container toolkit, not nvidia-fs, not the CUDA libraries.
_DRIVER = re.compile(
    r"cuda-drivers|"
    r"nvidia-(?:driver|open|headless|dkms|kernel|utils|compute-utils|firmware|smi|alternative|legacy|tesla|powerd|"
    r"persistenced|modprobe|settings|xconfig|egl|vulkan|vdpau|opencl|suspend|cuda-mps)|"
    r"libnvidia-(?:cfg|common|compute|decode|encode|extra|fbc|gl|gpucomp|ml1|ptxjit|nvvm|rtcore|egl|allocator|api|"
    r"pkcs11|opticalflow|glvkspirv|sandboxutils)|"
    r"libcuda1|libcudadebugger1|libnvcuvid1|libnvoptix1|firmware-nvidia-(?:gsp|tesla)|"
    r"linux-(?:modules|objects|signatures)-nvidia|xserver-xorg-video-nvidia|libxnvctrl"
)
# Tools of the driver that NVIDIA and the distributions version on their own; a mixture of these does no harm.
_INDEPENDENT = re.compile(r"nvidia-(?:modprobe|settings|xconfig|persistenced|kernel-common|driver-pinning)|libxnvctrl")


def is_driver_package(name: str) -> bool:
    """Whether a package is part of the NVIDIA driver, or pulls it in."""
    return _DRIVER.match(name) is not None


def is_lockstep_package(name: str) -> bool:
    """Whether a package must have the same version as the kernel module."""
    return is_driver_package(name) and not _INDEPENDENT.match(name)


def upstream(version: str) -> str:
    """Return the driver version inside a package version: ``580.95.05`` of ``1:580.95.05-1~bpo1``."""
    return re.sub(r"^\d+:", "", version).partition("-")[0]


@dataclass(frozen=True)
class Origin:
    """Where apt knows a version from: one line of a package list, with the Release fields of its repository."""

    place: str  # "http://deb.debian.org/debian trixie/contrib amd64 Packages"
    priority: int = 500
    origin: str = ""
    label: str = ""
    codename: str = ""

    @property
    def url(self) -> str:
        """Return the repository's URL."""
        return self.place.split(" ")[0]

    @property
    def vendor(self) -> str:
        """Return who publishes it: nvidia, ubuntu, debian, or the name it gives itself."""
        known = {"NVIDIA": "nvidia", "Ubuntu": "ubuntu", "Debian": "debian", "Debian Backports": "debian"}
        return known.get(self.origin, self.origin or self.url)


@dataclass(frozen=True)
class Versions:
    """The version table of one package; ``table`` is sorted as apt does it, the highest version first."""

    installed: str = ""
    candidate: str = ""
    table: Mapping[str, tuple[Origin, ...]] = field(default_factory=dict)


_SOURCE_LINE = re.compile(r"^\s+(-?\d+) (\S+.*)$")
_STATUS_FILE = "/var/lib/dpkg/status"


def repositories(policy: str) -> tuple[Origin, ...]:
    """Parse ``apt-cache policy`` without arguments: every package list with its Release fields."""
    found: list[Origin] = []
    for line in policy.splitlines():
        if line.startswith("Pinned packages"):
            break
        source = _SOURCE_LINE.match(line)
        if source:
            found.append(Origin(" ".join(source[2].split()), int(source[1])))
        elif line.lstrip().startswith("release ") and found:
            fields = dict(part.partition("=")[::2] for part in line.strip()[len("release ") :].split(","))
            last = found[-1]
            found[-1] = Origin(
                last.place,
                last.priority,
                fields.get("o", ""),
                fields.get("l", ""),
                fields.get("n", fields.get("a", "")),
            )
    return tuple(one for one in found if one.url != _STATUS_FILE)


def versions(policy: str, known: Iterable[Origin] = ()) -> dict[str, Versions]:
    """Parse ``apt-cache policy NAME...``; ``known`` (of ``repositories``) tells whose each package list is."""
    by_place = {one.place: one for one in known}
    result: dict[str, Versions] = {}
    name = installed = candidate = ""
    table: dict[str, tuple[Origin, ...]] = {}
    version = ""

    def finish() -> None:
        if name:
            result[name] = Versions(installed, candidate, dict(table))

    for line in policy.splitlines():
        if line and not line.startswith(" ") and line.endswith(":"):
            finish()
            name, installed, candidate, table, version = line[:-1], "", "", {}, ""
        elif line.startswith("  Installed: "):
            installed = line.split(": ", 1)[1].replace("(none)", "")
        elif line.startswith("  Candidate: "):
            candidate = line.split(": ", 1)[1].replace("(none)", "")
        elif re.match(r"^ (?:\*\*\*|   ) \S", line):
            version = line[5:].split()[0]
            table[version] = ()
        elif version and (source := _SOURCE_LINE.match(line)):
            place = " ".join(source[2].split())
            if not place.startswith(_STATUS_FILE):
                table[version] += (by_place.get(place, Origin(place, int(source[1]))),)
    finish()
    return result


@dataclass(frozen=True)
class Simulation:
    """What ``apt-get -s`` would do: package -> new version, package -> old version, and why it cannot."""

    install: Mapping[str, str] = field(default_factory=dict)
    remove: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def simulation(text: str) -> Simulation:
    """Parse stdout and stderr of ``apt-get -s install|remove``."""
    install = dict(re.findall(r"^Inst (\S+) (?:\[[^\]]*\] )?\((\S+)", text, re.M))
    remove = dict(re.findall(r"^(?:Remv|Purg) (\S+) \[([^\]]*)\]", text, re.M))
    # The dependencies say it better than apt's closing lines.
    problems = unmet(text) or tuple(line[3:].strip() for line in text.splitlines() if line.startswith("E: "))
    return Simulation(install, remove, tuple(dict.fromkeys(problems)))


_DEPENDS = re.compile(r"^ (\S[^:]*(?::[^: ]+)?) : +(?:Pre)?-?Depends: +(.+)$")
_CONTINUED = re.compile(r"^ {5,}(?:Pre-)?(?:Depends: +)?(\S.*)$")


def unmet(text: str) -> tuple[str, ...]:
    """Return one clear line for each unmet dependency that apt names."""
    found: list[str] = []
    package = ""
    for line in text.splitlines():
        start = _DEPENDS.match(line)
        if start:
            package = start[1].strip()
            found.append(f"{package} needs {_requirement(start[2])}")
        elif package and (more := _CONTINUED.match(line)):
            if not more[1].startswith("Recommends"):
                found.append(f"{package} needs {_requirement(more[1])}")
        else:
            package = ""
    return tuple(found)


def _requirement(text: str) -> str:
    wanted, but, have = text.partition(" but ")
    have = re.sub(r" is to be installed$| is installed$", " is what this host has", have)
    have = re.sub(r"^it is not (?:installable|going to be installed)$", "nothing here provides it", have)
    return f"{wanted.strip()}{': ' + have.strip() if but else ''}"


@dataclass(frozen=True)
class Installed:
    """One line of the package list: dpkg's state letters (``ii``, ``hi``, ``iF``), name, version."""

    state: str
    name: str
    version: str

    @property
    def complete(self) -> bool:
        """Whether it is unpacked and configured."""
        return self.state[1:2] == "i" and "R" not in self.state[2:]

    @property
    def broken(self) -> bool:
        """Whether dpkg stopped half way with it."""
        return self.state[1:2] in ("H", "U", "F", "W", "t") or "R" in self.state[2:]


def installed(text: str) -> dict[str, Installed]:
    """Parse ``state TAB name TAB version`` lines of dpkg-query; purged packages are left out."""
    result = {}
    for line in text.splitlines():
        parts = line.split("\t")
        if len(parts) >= 3 and parts[0].strip()[1:2] not in ("", "n", "c"):
            result[parts[1]] = Installed(parts[0].strip(), parts[1], parts[2])
    return result
