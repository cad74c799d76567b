"""Rules F: the NVIDIA driver of a guest or of bare metal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ..core.finding import Excerpt, Fix
from ..core.snapshot import AptChange, Fact, Snapshot
from . import apt
from .common import (
    FOREIGN_DRIVERS,
    driver_version,
    has_no_gpu,
    in_container,
    listed,
    log_excerpt,
    nvrm_lines,
    versions_differ,
)
from .gpu_views import models, module_flavour, no_gpu, recovery
from .join import joined
from .knowledge import version, version_text, version_tuple
from .registry import Fleet, Verdict, rule, verdict

_PROVISION = ("peerlane provision -i INVENTORY -l HOST",)
_REBOOT = "Reboots this machine; a running engine stops."
_HOLD = (
    "apt-mark hold $(dpkg-query -W -f '${db:Status-Abbrev} ${Package}\\n' '*nvidia*' | awk '/^.i/ {print $2}')",
    '# and keep unattended-upgrades off them: Unattended-Upgrade::Package-Blacklist { "nvidia"; "libnvidia"; };',
)


# --- F1: whether it runs --------------------------------------------------------------------------------------------


_LOST = re.compile(r"fallen off the bus|Xid")


@rule(
    "F1",
    "driver-loaded",
    title="The NVIDIA driver answers",
    roles=("bare_metal", "guest"),
    severity="critical",
    looks_at=("nvidia_smi", "nvidia_smi.q", "proc.driver.nvidia.version", "proc.modules"),
    why="Without a driver that answers nothing can be served.",
    restart="reboot",
    automation="ask",
    risk=_REBOOT,
    verify="nvidia-smi; echo $?   # wanted: 0",
    sources=("nvidia-smi exit codes", "recorded failures of several driver generations"),
    without_role=True,
)
def _driver_loaded(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    driver = snapshot.driver
    needing_reset = [gpu for gpu in snapshot.gpus.value or () if recovery(gpu)]
    smi = driver.smi.value
    if smi is None:
        if has_no_gpu(snapshot):
            yield no_gpu()
        elif driver.loaded_version.known:
            yield verdict(
                "unknown",
                f"The NVIDIA driver {driver.loaded_version.value} is loaded, but nvidia-smi was not run",
                driver.loaded_version,
                reason=driver.smi.reason or "nvidia-smi was not run",
            )
        else:
            yield verdict("unknown", "Whether the NVIDIA driver works is not known", reason=driver.smi.reason)
        return
    shown = Excerpt(driver.smi.source or "nvidia_smi", driver.smi.excerpt or smi.message)
    if smi.state == "ok":
        known = smi.driver_version or driver.loaded_version.value or "of unknown version"
        if needing_reset:
            yield verdict("pass", f"The NVIDIA driver {known} answers, but a GPU needs a reset: rule F16", shown)
        else:
            yield verdict("pass", f"The NVIDIA driver {known} answers", shown)
    elif smi.state == "version_mismatch":
        yield verdict("info", "The driver is loaded, but nvidia-smi cannot talk to it: rule F3 says why", shown)
    elif smi.state == "lost_gpu":
        lost = [line for line in nvrm_lines(snapshot) if _LOST.search(line.text)]
        which_ = f"GPU{'' if len(smi.lost) == 1 else 's'} {listed(smi.lost)}" if smi.lost else "a GPU"
        yield verdict(
            "fail",
            f"The driver lost {which_}",
            shown,
            *(
                [log_excerpt(snapshot, lost)]
                if (lost := [line for line in nvrm_lines(snapshot) if _LOST.search(line.text)])
                else []
            ),
            subject=smi.lost[0] if len(smi.lost) == 1 else "",
            why=(
                "nvidia-smi stops at the first dead GPU, so a missing line says nothing about the others: ask each "
                "by its uuid or bus id, or look with lspci. The bus id is shown as the driver printed it."
            ),
            fix=Fix(
                "Ask the other GPUs one by one, then power-cycle the machine; check seating, riser, power and cooling",
                ("lspci -d 10de:", "nvidia-smi -L", "nvidia-smi -i 0", "dmesg | grep -E 'Xid|NVRM|AER'"),
            ),
        )
    elif smi.state == "unknown_error":
        yield _unknown_error(snapshot, shown)
    elif has_no_gpu(snapshot):
        yield no_gpu()
    else:
        yield _not_working(snapshot, smi.state, shown, smi.message)


def _unknown_error(snapshot: Snapshot, shown: Excerpt) -> Verdict:
    inside = in_container(snapshot)
    return verdict(
        "fail",
        "NVML says unknown error"
        + (
            ": this container has lost its access to the GPUs" if inside else ": in a container, its GPU access is lost"
        ),
        shown,
        why=(
            "After systemctl daemon-reload on the host, systemd applies the container's device rules again without "
            "the NVIDIA nodes. The host's own nvidia-smi is fine then. This is no driver and library mismatch."
            + ("" if inside else " Outside a container, read the kernel log for Xid messages instead.")
        ),
        fix=Fix(
            "Restart the container; use CDI or /dev/char links so that it does not come back",
            (
                "nvidia-smi   # on the host: does it answer?",
                "nvidia-ctk system create-dev-char-symlinks --create-all",
                "# then restart the container",
            ),
            restart="service",
        ),
    )


def _not_working(snapshot: Snapshot, state: str, shown: Excerpt, message: str) -> Verdict:
    title, summary, steps = {
        "no_driver": (
            "The NVIDIA driver is not loaded",
            "Find out why it is not loaded: DKMS (H4), Secure Boot (F6), another driver (F5)",
            ("modprobe nvidia", "dmesg | grep -E 'NVRM|nvidia|nouveau' | tail -20", "dkms status"),
        ),
        "no_devices": (
            "The NVIDIA driver is loaded, but it can use no GPU",
            "Read why it refused them: MMIO space (B11), module flavour (F2)",
            ("lspci -d 10de: -vv | grep -E '^[0-9a-f]|Region'", "dmesg | grep NVRM | tail -20"),
        ),
        "not_found": (
            "There is no nvidia-smi: the driver's user space is not installed",
            "Install the driver (role nvidia_driver)",
            _PROVISION,
        ),
        "no_permission": (
            "nvidia-smi may not use the device nodes",
            "Run it as root, or give the user access to the NVIDIA devices",
            ("ls -l /dev/nvidia*",),
        ),
    }.get(
        state,
        (
            "nvidia-smi failed" + (f": {message.splitlines()[0]}" if message else ""),
            "Read its message and the kernel log",
            ("nvidia-smi; echo $?", "dmesg | grep -E 'NVRM|Xid' | tail -20"),
        ),
    )
    return verdict("fail", title, shown, fix=Fix(summary, steps))


# --- F2: flavour ----------------------------------------------------------------------------------------------------

_NEEDS_OPEN = "requires use of the NVIDIA open kernel modules"


@rule(
    "F2",
    "driver-flavour",
    title="The kernel module's flavour fits the GPUs",
    roles=("bare_metal", "guest"),
    severity="critical",
    looks_at=("proc.driver.nvidia.version", "modinfo.nvidia", "sysfs.pci", "kernel_log", "apt.output"),
    why="Blackwell works with the open kernel modules only; Maxwell, Pascal and Volta only with the proprietary ones.",
    restart="reboot",
    automation="ask",
    risk=_REBOOT,
    verify="modinfo -F license nvidia; cat /proc/driver/nvidia/version",
    sources=("NVIDIA driver installation guide", "NVIDIA open-gpu-kernel-modules #862"),
    without_role=True,
)
def _driver_flavour(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    yield from apt.flavour_flip(snapshot)
    said = [line for line in nvrm_lines(snapshot) if _NEEDS_OPEN in line.text]
    flavour = module_flavour(snapshot)
    if said and flavour.value != "open":
        yield verdict(
            "fail",
            "The driver says that a GPU requires the open kernel modules",
            log_excerpt(snapshot, said),
            flavour,
            fix=_other_flavour("open"),
            explains=("F1", "A5"),
        )
        return
    known = models(snapshot)
    if not known and has_no_gpu(snapshot):
        yield no_gpu()
        return
    if not flavour.known:
        yield verdict("unknown", "The flavour of the kernel module is not known", reason=flavour.reason)
        return
    need_open = [name for name, model in known.items() if model and model.open_modules == "required"]
    need_closed = [name for name, model in known.items() if model and model.open_modules == "unsupported"]
    if need_open and flavour.value == "proprietary":
        yield verdict(
            "fail",
            f"{listed(need_open)} is a Blackwell GPU, which needs the open kernel modules; these are proprietary",
            flavour,
            snapshot.pci.functions,
            fix=_other_flavour("open"),
            explains=("F1", "A5"),
        )
    elif need_closed and flavour.value == "open":
        yield verdict(
            "fail",
            f"{listed(need_closed)} is older than Turing, which needs the proprietary modules; these are open",
            flavour,
            snapshot.pci.functions,
            fix=_other_flavour("proprietary"),
            explains=("F1", "A5"),
        )
    elif not known or None in known.values():
        yield verdict(
            "unknown",
            f"Whether the {flavour.value} kernel modules fit the GPUs is not known",
            flavour,
            reason=snapshot.pci.functions.reason or "the model of a GPU is not known to this version of Peerlane",
        )
    else:
        yield verdict("pass", f"The {flavour.value} kernel modules fit the GPUs", flavour)


def _other_flavour(flavour: str) -> Fix:
    return Fix(
        f"Install the {flavour} kernel modules of the same version",
        (
            f"{_PROVISION[0]} -e nvidia_driver_flavour={flavour}",
            "# by hand: purge one flavour only in the run that installs the other, and read what apt lists as NEW",
        ),
    )


# --- F3: versions that do not match ---------------------------------------------------------------------------------


def _is_nvidia(package: str) -> bool:
    return "nvidia" in package or "cuda-drivers" in package or package.startswith("libnvidia")


def _cause(snapshot: Snapshot) -> AptChange | None:
    """Return the apt transaction that changed the library: the one that brought its version, else the last one."""
    changes = [
        one
        for one in snapshot.driver.apt_history.value or ()
        if any(_is_nvidia(name) for name, before, after in one.changes)
    ]
    library = snapshot.driver.library_version.value or (
        snapshot.driver.smi.value.library_version if snapshot.driver.smi.value else None
    )
    if library:
        brought = [one for one in changes if any(library in after for _, _, after in one.changes)]
        changes = brought or changes
    return changes[-1] if changes else None


@rule(
    "F3",
    "driver-lib-mismatch",
    title="The loaded module, the module on disk and the libraries have one version",
    roles=("bare_metal", "guest"),
    severity="critical",
    looks_at=(
        "nvidia_smi",
        "proc.driver.nvidia.version",
        "nvidia_libraries",
        "modinfo.nvidia",
        "apt.history",
        "apt.output",
    ),
    why="An upgrade that replaces files under a running driver breaks every new process that uses the GPU.",
    restart="reboot",
    automation="ask",
    risk=f"{_REBOOT} Never reload the modules while processes compute on the GPUs: they would die.",
    verify="cat /proc/driver/nvidia/version; modinfo -F version nvidia; nvidia-smi",
    sources=("nvidia-smi exit codes", "recorded: unattended upgrade of one library package"),
    without_role=True,
)
def _versions_match(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    yield from apt.conflicts(snapshot)
    driver = snapshot.driver
    smi = driver.smi.value
    loaded, library = driver.loaded_version.value, driver.library_version.value
    on_disk = driver.module_version.value
    library = library or (smi.library_version if smi else None)
    mismatch = (smi is not None and smi.state == "version_mismatch") or versions_differ(loaded, library)
    cause = _cause(snapshot)
    evidence: list[Fact[Any] | Excerpt] = [
        *([Excerpt(driver.smi.source or "nvidia_smi", driver.smi.excerpt or smi.message)] if smi and mismatch else []),
        driver.loaded_version,
        driver.library_version,
        driver.module_version,
    ]
    if cause is not None:
        evidence.append(_transaction(driver.apt_history, cause))
    reboot = Fix(
        "Stop what uses the GPUs, reboot, then pin the driver's packages",
        ("fuser -v /dev/nvidia*   # who uses the GPUs", "reboot", *_HOLD),
    )
    if mismatch:
        versions = f" (module {loaded}, library {library})" if loaded and library else ""
        by_what = (
            f": {_who(cause)} changed {listed(sorted({name.partition(':')[0] for name, _, _ in cause.changes}), 2)} "
            f"at {cause.started}"
            if cause is not None
            else ""
        )
        yield verdict(
            "fail",
            f"The driver's library does not match its loaded module{versions}{by_what}",
            *evidence,
            fix=reboot,
            explains=("F1",),
        )
    elif versions_differ(loaded, on_disk):
        yield verdict(
            "warn",
            f"Driver {loaded} is loaded, but {on_disk} is installed: a reboot is pending",
            *evidence,
            severity="medium",
            fix=reboot,
        )
    elif loaded and library:
        yield verdict("pass", f"Module and library are both {loaded}", driver.loaded_version, driver.library_version)
    elif smi is not None and smi.state == "ok":
        yield verdict("pass", "nvidia-smi answers, so module and library match", driver.smi)
    elif has_no_gpu(snapshot):
        yield no_gpu()
    else:
        missing = "the loaded module's version" if not loaded else "the library's version"
        reason = driver.loaded_version.reason if not loaded else driver.library_version.reason
        yield verdict(
            "unknown", "Whether the driver's versions match is not known", reason=f"{missing} was not read ({reason})"
        )


def _who(cause: AptChange) -> str:
    program = cause.command.split()[0].rsplit("/", 1)[-1] if cause.command.split() else "apt"
    return "unattended-upgrade" if program.startswith("unattended-upgrade") else program


def _transaction(history: Fact[tuple[AptChange, ...]], cause: AptChange) -> Excerpt:
    rows = [f"Start-Date: {cause.started}", f"Commandline: {cause.command}"]
    rows += [f"{name} {before} -> {after}" for name, before, after in cause.changes[:4]]
    return Excerpt(history.source or "apt.history", "\n".join(rows))


# --- F4: version ----------------------------------------------------------------------------------------------------


@rule(
    "F4",
    "driver-version",
    title="The driver is new enough for the GPUs, and the same on all hosts",
    roles=("bare_metal", "guest"),
    severity="medium",
    looks_at=("nvidia_smi", "proc.driver.nvidia.version", "sysfs.pci"),
    why="Older branches do not know newer GPUs, and hosts with different drivers behave differently under one engine.",
    restart="reboot",
    automation="ask",
    risk=_REBOOT,
    verify="nvidia-smi --query-gpu=driver_version --format=csv,noheader",
    sources=("NVIDIA open-gpu-kernel-modules tags 515 to 595",),
    without_role=True,
)
def _driver_version(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    own = driver_version(snapshot)
    if not own:
        if has_no_gpu(snapshot):
            yield no_gpu()
        else:
            yield verdict(
                "unknown",
                "The driver's version is not known",
                reason=snapshot.driver.loaded_version.reason or snapshot.driver.smi.reason or "it was not read",
            )
        return
    fact = snapshot.driver.loaded_version if snapshot.driver.loaded_version.known else snapshot.driver.smi
    text = version_text("driver.blackwell_minimum")
    blackwell = [
        name for name, model in models(snapshot).items() if model and model.architecture.startswith("blackwell")
    ]
    if blackwell and version_tuple(own) < version("driver.blackwell_minimum"):
        yield verdict(
            "fail",
            f"Driver {own} is older than {text}, the first that knows {listed(blackwell)}",
            fact,
            fix=Fix("Install a newer branch", _PROVISION),
            explains=("F1", "A5"),
        )
        return
    hosts, different = joined(fleet).other_drivers(own)
    if different:
        yield verdict(
            "warn",
            f"This host has driver {own}, while {listed(hosts)} has {listed(different)}",
            fact,
            fix=Fix("Pin one version for the fleet", _PROVISION),
        )
    elif snapshot.role.value == "guest" and version_tuple(own) < version("driver.grant_without_clique"):
        yield verdict(
            "info",
            f"Driver {own} grants P2P in a guest only by a clique; {version_text('driver.grant_without_clique')} may "
            "without",
            fact,
        )
    else:
        yield verdict("pass", f"Driver {own} is new enough for the GPUs that are known here", fact)


# --- F5: another driver ---------------------------------------------------------------------------------------------

_FOREIGN_LOG = re.compile(r"already bound to (nova|nouveau)\w*|probe routine was not called for \d+ device", re.I)


@rule(
    "F5",
    "foreign-driver-bound",
    title="No other driver holds the GPUs",
    roles=("bare_metal", "guest"),
    severity="critical",
    looks_at=("sysfs.pci", "lspci.vvv", "proc.modules", "kernel_log"),
    why="nouveau and nova come with the kernel and take the GPU first where they are in the initramfs.",
    restart="reboot",
    automation="ask",
    risk=_REBOOT,
    verify="lspci -nnk -d 10de:",
    sources=("recorded host with nouveau", "aikitoria/open-gpu-kernel-modules #24"),
    without_role=True,
)
def _foreign_driver(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    gpus = snapshot.pci.gpus()
    held = [one for one in gpus if one.driver in FOREIGN_DRIVERS]
    said = [line for line in nvrm_lines(snapshot) if _FOREIGN_LOG.search(line.text)]
    if held or said:
        drivers = sorted({str(one.driver) for one in held}) or ["another driver"]
        available = any("nvidia" in one.modules for one in held)
        yield verdict(
            "fail",
            (
                f"{listed([one.bdf for one in held])} is driven by {listed(drivers)}"
                if held
                else "Another driver holds a GPU"
            )
            + (", although the NVIDIA module is there" if available else ""),
            *(
                Excerpt(one.source or "sysfs.pci", f"{one.bdf} {one.name}\nKernel driver in use: {one.driver}")
                for one in held
            ),
            *([log_excerpt(snapshot, said)] if said else []),
            fix=Fix(
                "Blacklist the driver, rebuild the initramfs, reboot",
                (
                    "printf 'blacklist nouveau\\nblacklist nova_core\\nblacklist nova_drm\\noptions nouveau "
                    "modeset=0\\n' > /etc/modprobe.d/peerlane-nvidia.conf",
                    "update-initramfs -u -k all   # Fedora and RHEL: dracut --regenerate-all --force",
                    "reboot",
                ),
            ),
            explains=("F1",),
        )
        return
    known = [one for one in gpus if one.driver is not None]
    loaded = sorted(set(snapshot.kernel.modules.value or {}) & {"nouveau", "nova_core", "nova_drm"})
    if gpus and len(known) == len(gpus):
        if loaded:
            yield verdict(
                "warn",
                f"The module {listed(loaded)} is loaded, though it holds no NVIDIA GPU now",
                snapshot.kernel.modules,
                fix=Fix("Blacklist it", ("echo 'blacklist nouveau' > /etc/modprobe.d/peerlane-nvidia.conf",)),
            )
        else:
            yield verdict("pass", "No other driver holds a GPU", snapshot.pci.functions)
    elif has_no_gpu(snapshot):
        yield no_gpu()
    else:
        reason = snapshot.pci.functions.reason or "the list of PCI functions tells no driver for the GPUs"
        yield verdict("unknown", "Which driver holds the GPUs is not known", reason=reason)


# --- F6: Secure Boot ------------------------------------------------------------------------------------------------

_REJECTED = re.compile(
    r"Loading of module with unavailable key is rejected|Key was rejected by service|module verification failed.*reject"
)


@rule(
    "F6",
    "secure-boot-module",
    title="Secure Boot lets the NVIDIA module load",
    roles=("bare_metal", "guest"),
    severity="critical",
    looks_at=("mokutil.sb_state", "boot", "kernel_log", "lockdown", "proc.driver.nvidia.version"),
    why=(
        "With Secure Boot on, the kernel takes only modules whose key is enrolled; DKMS signs with a key of this "
        "machine."
    ),
    restart="reboot",
    automation="never",
    risk=(
        f"{_REBOOT} The enrolment is confirmed at the console (screen, IPMI or the VM's console) during the next boot."
    ),
    verify="mokutil --sb-state; modprobe nvidia && nvidia-smi",
    sources=("recorded host with a key that was not enrolled", "Debian and Ubuntu DKMS documentation"),
    without_role=True,
)
def _secure_boot(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    driver, kernel = snapshot.driver, snapshot.kernel
    # The cheap test first: a log has thousands of lines.
    log = kernel.log.value
    rejected = [one for one in (log.lines if log else ()) if "reject" in one.text and _REJECTED.search(one.text)]
    said = driver.smi.value.message if driver.smi.value else ""
    if rejected or "Key was rejected" in said:
        locked = (
            f" The kernel is in lockdown {kernel.lockdown.value}."
            if kernel.lockdown.value not in (None, "none")
            else ""
        )
        yield verdict(
            "fail",
            "Secure Boot rejects the NVIDIA module: the key that signed it is not enrolled",
            *([log_excerpt(snapshot, rejected)] if rejected else []),
            driver.secure_boot,
            kernel.lockdown,
            why="DKMS signed the module with a key of this machine that the firmware does not know." + locked,
            fix=Fix(
                "Enrol the key, with the console at hand; or use the distribution's signed modules",
                (
                    "mokutil --import /var/lib/dkms/mok.pub   # Ubuntu: /var/lib/shim-signed/mok/MOK.der",
                    "reboot   # at the console: Enroll MOK, Continue, Yes, the password",
                    "# Ubuntu without a console: apt install linux-modules-nvidia-NNN-$(uname -r)",
                ),
            ),
            explains=("F1",),
        )
        return
    state = driver.secure_boot.value
    if state in ("disabled", "unsupported"):
        yield verdict("pass", f"Secure Boot is {state}", driver.secure_boot)
    elif driver.loaded_version.known and state == "enabled":
        yield verdict(
            "pass", "Secure Boot is on, and the NVIDIA module is loaded", driver.secure_boot, driver.loaded_version
        )
    elif driver.loaded_version.known:
        yield verdict("pass", "The NVIDIA module is loaded, so Secure Boot does not reject it", driver.loaded_version)
    elif has_no_gpu(snapshot):
        yield no_gpu()
    elif state == "enabled":
        yield verdict(
            "unknown",
            "Secure Boot is on, and the NVIDIA module is not loaded: whether it was rejected is not known",
            driver.secure_boot,
            reason=kernel.log.reason or "the kernel log shows no attempt to load it",
        )
    else:
        yield verdict("unknown", "The state of Secure Boot is not known", reason=driver.secure_boot.reason)
