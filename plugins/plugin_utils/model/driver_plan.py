"""Decide which NVIDIA driver a host gets, and say why not before anything is installed.

Input is what the module ``driver_facts`` read, as text, and what the user wishes. The plan is computed as often as more
becomes known (package lists, candidate versions); whatever is not known yet stays empty with a note that says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..core.errors import InputError
from ..core.gpu_generation import Generation, generation
from ..parse import dkms
from . import apt_text
from .apt_text import Installed, Origin, Versions, is_driver_package, is_lockstep_package, upstream

SOURCES = ("auto", "ubuntu", "nvidia", "debian")
CODENAMES = {
    ("debian", "12"): "bookworm",
    ("debian", "13"): "trixie",
    ("ubuntu", "22.04"): "jammy",
    ("ubuntu", "24.04"): "noble",
}

# NVIDIA's long-term branch: supported until 2028, and the last one that knows every generation from Maxwell on.
LONG_TERM_BRANCH = 580
# From 590 on NVIDIA's Ubuntu packages carry no branch in their names (driver installation guide, "Recent Updates").
UNBRANCHED_FROM = 590
# From 620 on there are no proprietary kernel modules any more (the same place).
OPEN_ONLY_FROM = 620
# Ubuntu's ready modules, one package for each kernel.
SIGNED = "linux-modules-nvidia-"
# The branch that Debian's own archive carries.
DEBIAN_BRANCHES = {"12": 535, "13": 550}

# CUDA toolkit release notes, table "CUDA Toolkit and Corresponding Driver Versions". Within a major version newer
# toolkits run on the branch of the first one (minor version compatibility), so 13.x asks for 580 only.
_TOOLKIT_BRANCHES = ((13, 0, 580), (12, 9, 575), (12, 8, 570), (12, 6, 560), (12, 5, 555), (12, 4, 550), (12, 0, 525))

# Folder and key of NVIDIA's network repository, from its repository index and cuda-keyring 1.1. NVIDIA signs each
# distribution with a key of its own since Debian 13.
NVIDIA_REPOSITORIES = {
    ("debian", "12"): ("debian12", "3bf863cc.pub", "EB693B3035CD5710E231E123A4B469963BF863CC"),
    ("debian", "13"): ("debian13", "8793F200.pub", "02182E60104FCDC26EAE1B8597A5D4CB8793F200"),
    ("ubuntu", "22.04"): ("ubuntu2204", "3bf863cc.pub", "EB693B3035CD5710E231E123A4B469963BF863CC"),
    ("ubuntu", "24.04"): ("ubuntu2404", "3bf863cc.pub", "EB693B3035CD5710E231E123A4B469963BF863CC"),
}
NVIDIA_ROOT = "https://developer.download.nvidia.com/compute/cuda/repos"

# Apt patterns that cover the driver, not the CUDA toolkit and not the container toolkit.
DRIVER_PATTERNS = (
    "cuda-drivers*",
    "firmware-nvidia-*",
    "libcuda1",
    "libcudadebugger1",
    "libnvcuvid1",
    "libnvidia-[a-bd-z]*",
    "libnvidia-c[a-np-z]*",
    "libnvidia-compute*",
    "libnvoptix1",
    "linux-modules-nvidia-*",
    "nvidia-compute-utils*",
    "nvidia-d*",
    "nvidia-firmware-*",
    "nvidia-headless-*",
    "nvidia-kernel-*",
    "nvidia-modprobe",
    "nvidia-open*",
    "nvidia-persistenced",
    "nvidia-settings",
    "nvidia-smi",
    "nvidia-utils*",
)


@dataclass(frozen=True)
class Wishes:
    """What the user set. Empty strings mean: choose for me."""

    enabled: str = "auto"
    source: str = "auto"
    branch: str = "auto"
    version: str = ""
    flavour: str = "auto"
    modules: str = "auto"
    toolkit_versions: tuple[str, ...] = ()
    ignored_kernels: tuple[str, ...] = ()
    repository_url: str = "auto"
    key_url: str = "auto"
    key_fingerprint: str = "auto"


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU on the bus."""

    address: str
    device_id: str
    driver: str
    generation: Generation

    @property
    def name(self) -> str:
        """Return how a message calls it."""
        return f"{self.address} (10de:{self.device_id}, {self.generation.name})"


@dataclass(frozen=True)
class Host:
    """The facts of ``driver_facts``, parsed."""

    distribution: str
    release: str
    architecture: str
    container: str
    gpus: tuple[Gpu, ...]
    kernels: tuple[Mapping[str, Any], ...]
    packages: Mapping[str, Installed]
    holds: frozenset[str]
    repositories: tuple[Origin, ...]
    versions: Mapping[str, Versions]
    asked: frozenset[str]  # what apt was asked about: a name that is not among them is unknown, not missing
    dkms: tuple[Any, ...]
    secure_boot: bool | None
    secure_boot_reason: str
    keys: tuple[Mapping[str, Any], ...]
    loaded_version: str
    other_drivers: tuple[str, ...]
    runfile: bool
    lists_present: bool


@dataclass(frozen=True)
class Plan:
    """What the role does with one host. ``stops`` is why it does nothing: one line each, with what to do."""

    enabled: bool
    reason: str
    notes: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    container: str = ""
    source: str = ""
    flavour: str = ""
    modules: str = ""
    branch: int | None = None
    version: str = ""  # the upstream version, the same for the kernel module and the libraries
    packages: tuple[str, ...] = ()  # the driver's names, the kernel modules first
    headers: tuple[str, ...] = ()  # header packages that are still missing
    install: tuple[str, ...] = ()  # name=version, headers included
    repair: bool = False  # an earlier run was cut off: dpkg has to finish first
    kernels: tuple[str, ...] = ()
    pattern: str = " ".join(DRIVER_PATTERNS)
    repository: Mapping[str, str] = field(default_factory=dict)
    components: tuple[str, ...] = ()  # of Debian's archive, not configured yet
    components_url: str = ""
    lookups: tuple[str, ...] = ()  # names whose versions the next reading should bring

    def as_dict(self) -> dict[str, Any]:
        """Return plain types for Ansible."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def wishes(options: Mapping[str, Any]) -> Wishes:
    """Check the user's options; raises InputError in one line."""
    texts = {key: str(value).strip() for key, value in options.items() if not isinstance(value, list | tuple)}
    enabled = texts.get("enabled", "auto").lower()
    enabled = {"yes": "true", "no": "false"}.get(enabled, enabled)
    _choice("nvidia_driver_enabled", enabled, ("auto", "true", "false"))
    source = texts.get("source", "auto")
    _choice("nvidia_driver_source", source, SOURCES)
    flavour = texts.get("flavour", "auto")
    _choice("nvidia_driver_flavour", flavour, ("auto", "open", "proprietary"))
    modules = texts.get("modules", "auto")
    _choice("nvidia_driver_modules", modules, ("auto", "dkms", "signed"))
    branch = texts.get("branch", "auto") or "auto"
    if branch != "auto" and not re.fullmatch(r"\d{3}", branch):
        raise InputError(f"{branch!r} is no driver branch", "nvidia_driver_branch", "give three digits, such as 580")
    version = texts.get("version", "")
    if version and not re.match(r"(?:\d+:)?\d{3}\.\d+", version):
        raise InputError(f"{version!r} is no driver version", "nvidia_driver_version", "give one such as 580.95.05")
    if version and branch != "auto" and upstream(version).partition(".")[0] != branch:
        raise InputError(f"{version} is not of branch {branch}", "nvidia_driver_version", "leave one of the two out")
    toolkits = tuple(str(one) for one in options.get("toolkit_versions") or ())
    for one in toolkits:
        toolkit_branch(one)
    return Wishes(
        enabled=enabled,
        source=source,
        branch=branch,
        version=version,
        flavour=flavour,
        modules=modules,
        toolkit_versions=toolkits,
        ignored_kernels=tuple(str(one) for one in options.get("ignored_kernels") or ()),
        repository_url=texts.get("repository_url", "auto") or "auto",
        key_url=texts.get("key_url", "auto") or "auto",
        key_fingerprint=texts.get("key_fingerprint", "auto") or "auto",
    )


def _choice(where: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise InputError(f"{value!r} is not one of {', '.join(allowed)}", where)


def toolkit_branch(version: str) -> int:
    """Return the lowest driver branch that runs a CUDA toolkit (``12.8``)."""
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.\d+)?", version)
    if match:
        wanted = (int(match[1]), int(match[2]))
        for major, minor, branch in _TOOLKIT_BRANCHES:
            if wanted[0] == major and wanted >= (major, minor):
                return branch
    raise InputError(f"{version!r} is no CUDA version known here", "cuda_toolkit_versions", "give one such as 12.8")


def host(facts: Mapping[str, Any]) -> Host:
    """Parse what ``driver_facts`` returned."""
    lines = (line.partition("=") for line in str(facts["os_release"]).splitlines())
    release = {key: text.strip("\"'") for key, _, text in lines}
    gpus = tuple(
        Gpu(one["address"], one["device"], one["driver"], generation(int(one["device"], 16))) for one in facts["gpus"]
    )
    repositories = apt_text.repositories(facts["repositories"])
    return Host(
        distribution=release.get("ID", ""),
        release=release.get("VERSION_ID", ""),
        architecture=facts["architecture"],
        container=facts["container"],
        gpus=gpus,
        kernels=tuple(facts["kernels"]),
        packages=apt_text.installed(facts["packages"]),
        holds=frozenset(facts["holds"].split()),
        repositories=repositories,
        versions=apt_text.versions(facts["policy"], repositories),
        asked=frozenset(facts["asked"]),
        dkms=dkms.status(facts["dkms_status"]),
        secure_boot=facts["secure_boot"],
        secure_boot_reason=facts["secure_boot_reason"],
        keys=tuple(facts["keys"]),
        loaded_version=facts["loaded_version"],
        other_drivers=tuple(facts["other_drivers"]),
        runfile=bool(facts["runfile"]),
        lists_present=bool(facts["lists_present"]),
    )


def plan(facts: Mapping[str, Any], options: Mapping[str, Any]) -> Plan:
    """Return the plan for one host. Raises InputError for a wish that cannot be understood."""
    wish = wishes(options)
    here = host(facts)
    names = tuple(gpu.name for gpu in here.gpus)
    if wish.enabled == "false":
        return Plan(False, "nvidia_driver_enabled is false", gpus=names, container=here.container)
    if wish.enabled == "auto" and not here.gpus:
        return Plan(False, "no NVIDIA GPU on the PCI bus", container=here.container)
    notes: list[str] = []
    stops: list[str] = list(unsupported(here))
    if stops:
        return Plan(True, "", stops=tuple(stops), gpus=names, container=here.container)

    source = _source(wish, here, stops)
    flavour = _flavour(wish, here, stops, notes)
    branch = _branch(wish, here, source, stops, notes)
    modules = _modules(wish, here, source, stops)
    kernels = tuple(one["release"] for one in here.kernels if one["release"] not in wish.ignored_kernels)
    packages = package_names(source, here, branch, flavour, modules, kernels)
    repair = _check_packages(here, source, stops, notes)
    stops += _foreign_suites(here)
    stops += _secure_boot(here, modules)
    headers = _headers(here, kernels, stops, notes) if modules == "dkms" else ()
    version, install = _versions(wish, here, source, branch, packages, stops, notes)
    if here.container:
        notes.append(f"inside a container ({here.container}): no module can be loaded here, and no initramfs is made")
    if not here.gpus:
        notes.append("no NVIDIA GPU here: whether the driver works with one is not proven")
    if flavour == "proprietary" and branch is not None and branch >= OPEN_ONLY_FROM:
        stops.append(
            f"branch {branch} has no proprietary kernel modules (gone since {OPEN_ONLY_FROM}); "
            "set nvidia_driver_branch to 580 or nvidia_driver_flavour to open"
        )
    return Plan(
        enabled=True,
        reason=f"{len(here.gpus)} NVIDIA GPU(s)" if here.gpus else "nvidia_driver_enabled is true",
        notes=tuple(notes),
        stops=tuple(dict.fromkeys(stops)),
        gpus=names,
        container=here.container,
        source=source,
        flavour=flavour,
        modules=modules,
        branch=branch,
        version=version,
        packages=packages,
        headers=headers,
        install=(*headers, *install),
        repair=repair,
        kernels=kernels,
        repository=repository(wish, here),
        components=_components(here) if source == "debian" else (),
        components_url=_archive(here),
        lookups=(*packages, *(name for one in here.kernels for name in header_names(one["release"]))),
    )


def unsupported(here: Host) -> Iterable[str]:
    """Say why no package of NVIDIA fits this system, if none does."""
    if (here.distribution, here.release) not in CODENAMES:
        known = ", ".join(f"{name} {number}" for name, number in CODENAMES)
        yield f"{here.distribution or 'this system'} {here.release} is not supported; supported are {known}"
    if here.architecture not in ("amd64", "arm64"):
        yield f"architecture {here.architecture}: NVIDIA has no driver for it; a 64-bit system is needed"


def _source(wish: Wishes, here: Host, stops: list[str]) -> str:
    source = wish.source
    if source == "auto":
        return "ubuntu" if here.distribution == "ubuntu" else "nvidia"
    if source in ("ubuntu", "debian") and source != here.distribution:
        stops.append(
            f"nvidia_driver_source is {source}, but this host runs {here.distribution} {here.release}; packages of "
            f"another distribution do not fit its C library. Use {here.distribution} or nvidia"
        )
    return source


def _flavour(wish: Wishes, here: Host, stops: list[str], notes: list[str]) -> str:
    for gpu in here.gpus:
        if gpu.generation.modules == "none":
            stops.append(f"GPU {gpu.name}: no supported driver branch has kernel modules for it; take it out or off")
    needs = {kind: [gpu for gpu in here.gpus if gpu.generation.modules == kind] for kind in ("open", "proprietary")}
    if needs["open"] and needs["proprietary"]:
        stops.append(
            f"GPU {needs['open'][0].name} needs the open kernel modules, GPU {needs['proprietary'][0].name} the "
            "proprietary ones; one host can load one flavour, so take one of the two out"
        )
    must = "open" if needs["open"] else "proprietary" if needs["proprietary"] else ""
    if must and wish.flavour not in ("auto", must):
        stops.append(
            f"GPU {needs[must][0].name} works with the {must} kernel modules only; "
            f"set nvidia_driver_flavour to auto or {must}"
        )
    for gpu in here.gpus:
        if gpu.generation.name.startswith("newer"):
            notes.append(f"GPU {gpu.name}: id not in the table; open kernel modules, as for all since Blackwell")
    if must:
        return must
    return "open" if wish.flavour == "auto" else wish.flavour


def _branch(wish: Wishes, here: Host, source: str, stops: list[str], notes: list[str]) -> int | None:
    lowest = [(gpu.generation.lowest_branch or 0, f"GPU {gpu.name}") for gpu in here.gpus]
    lowest += [(toolkit_branch(one), f"CUDA toolkit {one}") for one in wish.toolkit_versions]
    least, why = max(lowest, default=(0, ""))
    last = [(gpu.generation.last_branch, gpu) for gpu in here.gpus if gpu.generation.last_branch]
    if wish.version:
        branch = int(upstream(wish.version).partition(".")[0])
    elif wish.branch != "auto":
        branch = int(wish.branch)
    elif source == "debian":
        branch = DEBIAN_BRANCHES.get(here.release, least)
    else:
        branch = max(LONG_TERM_BRANCH, least)
    if branch < least:
        others = "nvidia_driver_source: nvidia" if source == "debian" else f"nvidia_driver_branch: '{least}'"
        stops.append(f"branch {branch} is too old: {why} needs at least {least}; set {others}")
    for end, gpu in last:
        if end is not None and branch > end:
            stops.append(
                f"branch {branch} is too new: {end} is the last one for GPU {gpu.name}; set nvidia_driver_branch"
            )
    if why:
        notes.append(f"branch {branch}: at least {least} is needed by {why}")
    return branch


def _modules(wish: Wishes, here: Host, source: str, stops: list[str]) -> str:
    if wish.modules == "auto":
        return "signed" if source == "ubuntu" and here.secure_boot else "dkms"
    if wish.modules == "signed" and source != "ubuntu":
        stops.append("nvidia_driver_modules is signed, but only Ubuntu's archive has signed modules; use dkms")
    return wish.modules


def package_names(
    source: str, here: Host, branch: int | None, flavour: str, modules: str, kernels: Sequence[str]
) -> tuple[str, ...]:
    """Return the packages of a headless compute driver, the kernel module first.

    Ubuntu: the ``-server`` series of its archive. NVIDIA: the "compute-only" sets of its driver installation guide.
    """
    is_open = flavour == "open"
    if source == "ubuntu":
        tail = f"{branch}-server"
        users = (f"libnvidia-compute-{tail}", f"nvidia-utils-{tail}", f"nvidia-compute-utils-{tail}")
        opened = f"{tail}-open" if is_open else tail
        if modules == "signed":
            return (*(f"linux-modules-nvidia-{opened}-{kernel}" for kernel in kernels), *users)
        return (f"nvidia-dkms-{opened}", *users)
    if source == "debian":
        kernel = "nvidia-open-kernel-dkms" if is_open else "nvidia-kernel-dkms"
        return (kernel, "libcuda1", "libnvidia-ml1", "nvidia-smi", "nvidia-persistenced")
    if here.distribution == "debian":
        kernel = "nvidia-kernel-open-dkms" if is_open else "nvidia-kernel-dkms"
        return (kernel, "nvidia-driver-cuda", "nvidia-persistenced")
    tail = "" if branch is not None and branch >= UNBRANCHED_FROM else f"-{branch}"
    kernel = f"nvidia-dkms{tail}-open" if is_open else f"nvidia-dkms{tail}"
    return (kernel, f"libnvidia-compute{tail}", f"nvidia-utils{tail}", f"nvidia-compute-utils{tail}")


def lead_package(packages: Sequence[str]) -> str:
    """Return the package whose version is the driver's: signed modules are numbered by their kernel instead."""
    return next((name for name in packages if not name.startswith(SIGNED)), "")


def header_names(release: str) -> tuple[str, ...]:
    """Return the packages that may hold a kernel's headers, the usual name first. Proxmox names its own kernels."""
    if release.endswith("-pve"):
        return (f"proxmox-headers-{release}", f"pve-headers-{release}")
    return (f"linux-headers-{release}",)


def _headers(here: Host, kernels: Sequence[str], stops: list[str], notes: list[str]) -> tuple[str, ...]:
    missing = []
    for one in here.kernels:
        release = one["release"]
        if release not in kernels or one["headers"]:
            continue
        names = header_names(release)
        found = next((name for name in names if here.versions.get(name, Versions()).candidate), None)
        if found:
            missing.append(found)
        elif not here.lists_present:
            notes.append(f"kernel {release}: whether {names[0]} exists is not known, apt has no package lists yet")
        else:
            running = " (running)" if one["running"] else ""
            stops.append(
                f"kernel {release}{running} has no headers, and no repository offers {' or '.join(names)}: DKMS could "
                "build no module for it. Boot the newest kernel and remove this one, or name it in "
                "nvidia_driver_ignored_kernels"
            )
    return tuple(missing)


def _check_packages(here: Host, source: str, stops: list[str], notes: list[str]) -> bool:
    """Look at what is installed already; returns whether an earlier run of this plan has to be finished first."""
    if here.runfile:
        stops.append(
            "a driver of NVIDIA's .run installer is in place (/usr/bin/nvidia-uninstall), which packages would "
            "overwrite; run nvidia-uninstall first"
        )
    driver = {name: one for name, one in here.packages.items() if is_lockstep_package(name)}
    vendors: dict[str, list[Installed]] = {}
    for name, one in driver.items():
        origins = here.versions.get(name, Versions()).table.get(one.version, ())
        vendors.setdefault("/".join(sorted({origin.vendor for origin in origins})) or "unknown", []).append(one)
    known = {vendor: found for vendor, found in vendors.items() if vendor != "unknown"}
    if len(known) > 1:
        parts = "; ".join(f"{vendor}: {found[0].name} {found[0].version}" for vendor, found in sorted(known.items()))
        stops.append(
            f"driver packages of several repositories are mixed ({parts}); keep one: purge the others' packages, then "
            "run this again"
        )
    elif known and source not in next(iter(known)).split("/"):
        vendor, found = next(iter(known.items()))
        stops.append(
            f"{found[0].name} {found[0].version} comes from {vendor}, but nvidia_driver_source is {source}; purge the "
            f"installed driver first, or set nvidia_driver_source to {vendor}"
        )
    broken = [one for name, one in here.packages.items() if one.broken and (is_driver_package(name) or name == "dkms")]
    if not broken:
        return False
    ours = known and set(known) == {source} and "unknown" not in vendors
    text = ", ".join(f"{one.name} {one.version} ({one.state})" for one in broken)
    if ours:
        notes.append(f"an earlier run was cut off: dpkg finishes {text} first")
        return True
    stops.append(
        f"dpkg stopped half way with {text}, which is not what this plan installs; finish it with "
        f"'dpkg --configure -a' or remove it with 'apt-get purge {' '.join(one.name for one in broken)}'"
    )
    return False


def _foreign_suites(here: Host) -> Iterable[str]:
    mine = CODENAMES[(here.distribution, here.release)]
    folder = NVIDIA_REPOSITORIES[(here.distribution, here.release)][0]
    for one in here.repositories:
        if one.priority < 500:
            continue
        other = re.search(r"/cuda/repos/((?:debian|ubuntu)\d+)/", one.place)
        if other and other[1] != folder:
            yield f"apt source {one.url} is for {other[1]}, this host is {folder}; remove that source"
        elif one.vendor in ("debian", "ubuntu") and (
            one.vendor != here.distribution or (one.codename and not one.codename.startswith(mine))
        ):
            yield (
                f"apt source {one.place} is {one.origin} {one.codename}, this host is {here.distribution} {mine}: its "
                "packages need another C library; remove that source"
            )


def _secure_boot(here: Host, modules: str) -> Iterable[str]:
    if here.container or modules == "signed" or not here.secure_boot:
        return
    enrolled = [key for key in here.keys if key["enrolled"]]
    if enrolled:
        return
    signed = ", or set nvidia_driver_modules to signed" if here.distribution == "ubuntu" else ""
    if not here.keys:
        yield (
            "Secure Boot is on and there is no key yet that DKMS could sign with: the module would be refused at boot. "
            "Make one ('dkms generate_mok', on Ubuntu 'update-secureboot-policy --new-key'), enrol it with 'mokutil "
            f"--import', confirm at the console during the next boot{signed}"
        )
    elif any(key["enrolled"] is None for key in here.keys):
        yield (
            f"Secure Boot is on and it cannot be read whether {here.keys[0]['path']} is enrolled "
            f"({here.keys[0].get('reason') or 'no reason given'}); run as root, or check with 'mokutil --test-key'"
        )
    else:
        path = here.keys[0]["path"]
        yield (
            f"Secure Boot is on and the DKMS key {path} is not enrolled: the module would be refused at boot. Run "
            f"'mokutil --import {path}', confirm at the console during the next boot{signed}"
        )


def _versions(
    wish: Wishes,
    here: Host,
    source: str,
    branch: int | None,
    packages: Sequence[str],
    stops: list[str],
    notes: list[str],
) -> tuple[str, tuple[str, ...]]:
    """Choose the exact version of each package: the installed one if it still fits, else the best of the source."""
    if not packages:
        return "", ()
    lead = lead_package(packages)
    offered = {name: _offered(here.versions.get(name, Versions()), source) for name in packages}
    kept = here.packages.get(lead)
    if kept and kept.complete and _fits(kept.version, wish, branch):
        chosen = kept.version
    else:
        fitting = [version for version in offered[lead] if _fits(version, wish, branch)]
        if not fitting:
            return "", _no_version(wish, here, source, branch, lead, offered[lead], stops, notes)
        # Another flavour of the modules is no reason for another version.
        there = {upstream(one.version) for name, one in here.packages.items() if is_lockstep_package(name)}
        chosen = next((version for version in fitting if upstream(version) in there), fitting[0])
    newer = [version for version in offered[lead] if _fits(version, wish, branch)][:1]
    if kept and newer and newer[0] != chosen:
        notes.append(f"{newer[0]} is available; {chosen} stays until nvidia_driver_version says otherwise")
    wanted = upstream(chosen)
    install = []
    for name in packages:
        if name == lead:
            install.append(f"{lead}={chosen}")
            continue
        if name.startswith(SIGNED):
            if offered[name] or name in here.packages:
                install.append(name)
            elif name in here.asked:
                stops.append(
                    f"{source} has no signed modules {name}; set nvidia_driver_modules to dkms, or boot another kernel"
                )
            continue
        have = here.packages.get(name)
        same = [version for version in offered[name] if upstream(version) == wanted]
        if have and have.complete and upstream(have.version) == wanted:
            install.append(f"{name}={have.version}")
        elif same:
            install.append(f"{name}={same[0]}")
        elif have and have.complete and not is_lockstep_package(name):
            install.append(f"{name}={have.version}")
        elif offered[name] and not is_lockstep_package(name):
            install.append(f"{name}={offered[name][0]}")
        elif name in here.asked:
            stops.append(
                f"{name} {wanted} is not offered by {source}, only {', '.join(offered[name][:3]) or 'nothing'}: kernel "
                "module and libraries must have one version; set nvidia_driver_version to one that is complete"
            )
    # apt keeps held libraries at their version, so each one that has to move with the module is named.
    for name, have in here.packages.items():
        if name in packages or "dkms" in name or not is_lockstep_package(name) or upstream(have.version) == wanted:
            continue
        same = [
            version for version in _offered(here.versions.get(name, Versions()), source) if upstream(version) == wanted
        ]
        install += [f"{name}={version}" for version in same[:1]]
    return wanted, tuple(install)


def _offered(table: Versions, source: str) -> list[str]:
    return [version for version, origins in table.table.items() if any(one.vendor == source for one in origins)]


def _fits(version: str, wish: Wishes, branch: int | None) -> bool:
    if wish.version:
        return wish.version in (version, upstream(version))
    return upstream(version).startswith(f"{branch}.")


def _no_version(
    wish: Wishes,
    here: Host,
    source: str,
    branch: int | None,
    lead: str,
    offered: Sequence[str],
    stops: list[str],
    notes: list[str],
) -> tuple[str, ...]:
    there = any(one.vendor == source for one in here.repositories)
    if offered:
        stops.append(
            f"{source} offers {lead} {', '.join(offered[:4])}, not {wish.version or f'branch {branch}'}; set "
            "nvidia_driver_branch or nvidia_driver_version to what it has, or another nvidia_driver_source"
        )
    elif lead in here.versions and there:
        stops.append(f"{lead} is known to apt, but not from {source}; check nvidia_driver_source")
    else:
        notes.append(f"exact version not known yet: apt has no package list of {source} with {lead} in it")
    return ()


def _components(here: Host) -> tuple[str, ...]:
    """Return the components of Debian's archive that hold the driver and are not named to apt yet."""
    mine = CODENAMES[(here.distribution, here.release)]
    there = {one.place.split(" ")[1].partition("/")[2] for one in here.repositories if one.codename == mine}
    return tuple(one for one in ("contrib", "non-free", "non-free-firmware") if one not in there)


def _archive(here: Host) -> str:
    """Return the mirror that this host has Debian's main component from."""
    mine = CODENAMES[(here.distribution, here.release)]
    places = (one for one in here.repositories if one.codename == mine and f"{mine}/main" in one.place)
    return next((one.url for one in places), "http://deb.debian.org/debian")


def repository(wish: Wishes, here: Host) -> dict[str, str]:
    """Return URL, key and fingerprint of NVIDIA's network repository for this host."""
    folder, key, fingerprint = NVIDIA_REPOSITORIES[(here.distribution, here.release)]
    machine = "x86_64" if here.architecture == "amd64" else "sbsa"
    url = f"{NVIDIA_ROOT}/{folder}/{machine}" if wish.repository_url == "auto" else wish.repository_url.rstrip("/")
    return {
        "url": url,
        "key_url": f"{url}/{key}" if wish.key_url == "auto" else wish.key_url,
        "fingerprint": fingerprint if wish.key_fingerprint == "auto" else wish.key_fingerprint,
        "codename": CODENAMES[(here.distribution, here.release)],
    }
