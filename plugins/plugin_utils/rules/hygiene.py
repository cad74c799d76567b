"""Rules H: kernel parameters, and whether each kernel has its module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..core.finding import Excerpt, Fix
from ..core.snapshot import CommandLine, DkmsState, Fact, Snapshot
from .apt import missing_headers
from .common import SECURITY_NOTES, in_container, is_pve_kernel, kernel_version, listed, listed_items, token
from .hypervisor import iommu_off_tokens, set_kernel_parameters
from .knowledge import version, version_text, version_tuple
from .registry import Fleet, Verdict, rule, verdict

# --- H1: kernel parameters ------------------------------------------------------------------------------------------

_BAD_PCI = {
    "noats": "ATS is off: GPUDirect RDMA in a VM needs it",
    "noaer": "PCIe errors are not reported any more",
    "nomsi": "devices fall back to shared interrupts",
}
_SINGLE = ("iommu", "intel_iommu", "amd_iommu", "mitigations", "pcie_aspm", "default_hugepagesz")


@rule(
    "H1",
    "cmdline-hygiene",
    title="No kernel parameter contradicts another, or does harm",
    severity="medium",
    looks_at=("proc.cmdline", "etc.default.grub", "uname"),
    why=(
        "Parameters pile up from guides for other machines; some undo each other, some only look as if they did "
        "something."
    ),
    restart="reboot",
    automation="never",
    risk=f"Reboots this machine. {SECURITY_NOTES['mitigations']}",
    verify="cat /proc/cmdline",
    sources=("kernel documentation, kernel-parameters", "recorded command lines"),
    without_role=True,
)
def _cmdline_hygiene(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    kernel = snapshot.kernel
    fact = kernel.command_line if kernel.command_line.known else kernel.grub_default
    found = list(_sticky_grub(snapshot))
    if fact.value is None:
        if not found:
            yield verdict("unknown", "The kernel parameters are not known", reason=kernel.command_line.reason)
        yield from found
        return
    where = "" if kernel.command_line.known else " (in /etc/default/grub; whether it runs so was not read)"
    found += _judge_parameters(snapshot, fact.value, fact, where)
    yield from found
    if not found:
        yield verdict("pass", "No kernel parameter contradicts another or does harm", fact)


def _judge_parameters(snapshot: Snapshot, line: CommandLine, fact: Fact[CommandLine], where: str) -> Iterator[Verdict]:
    role = snapshot.role.value
    off = iommu_off_tokens(line)
    pci = listed_items(line, "pci")
    for item, why in _BAD_PCI.items():
        if item in pci:
            yield _parameter(snapshot, "fail", f"pci={item}", f"pci={item}: {why}{where}", fact)
    if line.has("nopat"):
        yield _parameter(snapshot, "fail", "nopat", f"nopat makes device memory uncached and slow{where}", fact)
    if "realloc" in pci or any(one.startswith("realloc=") for one in pci):
        yield _parameter(
            snapshot, "info", "pci=realloc", f"pci=realloc: the kernel moves PCI windows itself{where}", fact
        )
    if off and role != "hypervisor":
        shown = listed(off)
        yield _parameter(
            snapshot,
            "info",
            off[0],
            f"{shown}: fine for P2P on bare metal, but no device can be passed to a VM{where}",
            fact,
        )
    if off and line.last("iommu") == "pt":
        yield _parameter(snapshot, "info", "iommu=pt", f"iommu=pt has no effect next to {listed(off)}{where}", fact)
    yield from _acs_override(snapshot, line, fact, where, off)
    if line.last("mitigations") == "off":
        yield _parameter(
            snapshot,
            "warn",
            "mitigations=off",
            f"mitigations=off switches CPU protections off: a security choice that Peerlane never makes{where}",
            fact,
        )
    if line.last("amd_iommu") == "on":
        yield _parameter(
            snapshot,
            "info",
            "amd_iommu=on",
            f"amd_iommu=on is no value that the kernel knows; AMD's IOMMU is on without it{where}",
            fact,
        )
    yield from _framebuffer(snapshot, line, fact, where)
    for key in _SINGLE:
        values = list(dict.fromkeys(value or "" for value in line.all(key)))
        if len(values) > 1:
            yield _parameter(
                snapshot, "info", key, f"{key} is given {len(values)} times, and {key}={values[-1]} counts{where}", fact
            )


def _parameter(snapshot: Snapshot, state: str, subject: str, title: str, fact: Fact[CommandLine]) -> Verdict:
    fix = Fix(f"Remove {subject}", set_kernel_parameters(snapshot, f"remove {subject}"))
    if state == "fail":
        return verdict("fail", title, fact, subject=subject, fix=fix)
    if state == "warn":
        return verdict("warn", title, fact, subject=subject, fix=fix)
    return verdict("info", title, fact, subject=subject)


def _acs_override(
    snapshot: Snapshot, line: CommandLine, fact: Fact[CommandLine], where: str, off: Sequence[str]
) -> Iterator[Verdict]:
    items = listed_items(line, "pcie_acs_override")
    if not items:
        return
    shown = token("pcie_acs_override", ",".join(items))
    release = snapshot.kernel.release.value or line.last("BOOT_IMAGE") or ""
    reasons = [f"next to {listed(off)}"] if off else []
    if release and not is_pve_kernel(release):
        reasons.append(f"on kernel {release.rsplit('vmlinuz-', 1)[-1]}, which ignores it")
    if reasons:
        yield _parameter(
            snapshot, "info", "pcie_acs_override", f"{shown} has no effect {' and '.join(reasons)}{where}", fact
        )
    elif snapshot.role.value != "hypervisor":
        yield _parameter(
            snapshot, "info", "pcie_acs_override", f"{shown} only claims isolation between devices{where}", fact
        )


def _framebuffer(snapshot: Snapshot, line: CommandLine, fact: Fact[CommandLine], where: str) -> Iterator[Verdict]:
    values = [value for value in line.all("video") if value and re.search(r"(efifb|vesafb):off", value)]
    if not values:
        return
    image = line.last("BOOT_IMAGE") or ""
    running = kernel_version(snapshot) or version_tuple(image.rsplit("vmlinuz-", 1)[-1] if "vmlinuz-" in image else "")
    if not running or running < version("kernel.sysfb_ignores_video_off"):
        return
    text = version_text("kernel.sysfb_ignores_video_off")
    yield _parameter(
        snapshot,
        "warn",
        "video",
        f"{listed([token('video', one) for one in values])} {'has' if len(values) == 1 else 'have'} no effect from "
        f"kernel {text} on; initcall_blacklist=sysfb_init is what frees the boot framebuffer{where}",
        fact,
    )


def _sticky_grub(snapshot: Snapshot) -> Iterator[Verdict]:
    settings = snapshot.kernel.grub_settings
    given = {key: value.strip("\"'") for key, value in (settings.value or {}).items()}
    if given.get("GRUB_DEFAULT") == "saved" and given.get("GRUB_SAVEDEFAULT") == "true":
        yield verdict(
            "warn",
            "GRUB starts whichever kernel was started last (GRUB_DEFAULT=saved, GRUB_SAVEDEFAULT=true): no kernel "
            "is pinned",
            Excerpt(settings.source or "etc.default.grub", "GRUB_DEFAULT=saved\nGRUB_SAVEDEFAULT=true"),
            subject="GRUB_DEFAULT",
            fix=Fix(
                "Name the wanted menu entry, or take the newest kernel",
                (
                    "cp -a /etc/default/grub /root/grub.bak",
                    "# /etc/default/grub: GRUB_SAVEDEFAULT=false and GRUB_DEFAULT=0",
                    "update-grub",
                ),
            ),
        )


# --- H4: DKMS -------------------------------------------------------------------------------------------------------


def _header_package(snapshot: Snapshot, release: str) -> str:
    """Return the package with the headers of a kernel: Proxmox names it differently."""
    if not is_pve_kernel(release):
        return f"linux-headers-{release}"
    new = version_tuple(release) >= version("kernel.proxmox_header_names")
    return f"{'proxmox' if new else 'pve'}-headers-{release}"


def _header_meta(release: str) -> str:
    """Return the package that always follows the newest kernel's headers."""
    if not is_pve_kernel(release):
        arch = release.rsplit("-", 1)[-1]
        return f"linux-headers-{arch}" if arch in ("amd64", "arm64", "generic") else "linux-headers-generic"
    return "proxmox-default-headers"


def _old(release: str) -> str:
    return "   # Proxmox VE 7: pve-headers" if is_pve_kernel(release) else ""


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release))


def _newer_installed(snapshot: Snapshot) -> str | None:
    """Return the newest installed kernel, where it is newer than the running one."""
    running, installed = snapshot.kernel.release.value, snapshot.kernel.installed.value or ()
    newest = max(installed, key=_order, default=None)
    return newest if running and newest and _order(newest) > _order(running) else None


@rule(
    "H4",
    "dkms-headers",
    title="Every installed kernel has its DKMS modules",
    severity="high",
    looks_at=("dkms.status", "dkms.log", "apt.output", "kernels", "uname", "dpkg"),
    why="A kernel without its module starts without a driver; a module is built only where the kernel's headers are.",
    restart="reboot",
    automation="ask",
    risk="A failed build leaves the old module of the running kernel in place; the next boot shows the damage.",
    verify="dkms status",
    sources=("recorded DKMS failures on Proxmox kernels", "NVIDIA open-gpu-kernel-modules #1143"),
    without_role=True,
)
def _dkms(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    states = snapshot.driver.dkms
    if states.value is None:
        yield verdict("unknown", "Whether DKMS built the modules is not known", reason=states.reason)
        return
    modules: dict[str, list[DkmsState]] = {}
    for one in states.value:
        modules.setdefault(one.module, []).append(one)
    if not modules:
        yield verdict("not_applicable", "DKMS manages no module", states, reason="dkms status is empty")
        return
    for module, rows in sorted(modules.items()):
        yield from _judge_module(snapshot, module, rows)


def _judge_module(snapshot: Snapshot, module: str, rows: list[DkmsState]) -> Iterator[Verdict]:
    failed = [one for one in rows if one.state in ("failed", "broken")]
    headless = [one for one in rows if one.state == "headers_missing"]
    for one in failed:
        yield _build_failed(snapshot, one)
    for one in headless:
        yield _no_headers(snapshot, one)
    if failed or headless:
        return
    running = None if in_container(snapshot) else snapshot.kernel.release.value
    built = {one.kernel for one in rows if one.state == "installed"}
    nvidia = module.startswith("nvidia")
    evidence = snapshot.driver.dkms
    installed = snapshot.kernel.installed
    odd = [one for one in rows if one.note]
    if running is None and not installed.known:
        yield verdict(
            "unknown",
            f"Whether {module} is built for every kernel is not known",
            evidence,
            subject=module,
            reason="in a container the running kernel is the host's, and no kernel is installed here"
            if in_container(snapshot)
            else "neither the running nor the installed kernels are known",
        )
        return
    missing = [one for one in installed.value or () if one not in built]
    if running is not None and running not in built:
        yield verdict(
            "fail",
            f"DKMS has no {module} module for the running kernel {running}",
            evidence,
            snapshot.kernel.release,
            subject=module,
            severity=None if nvidia else "medium",
            fix=_build_fix(snapshot, rows[0], running),
            explains=("F1",) if nvidia else (),
        )
    elif missing:
        newest = max(missing, key=_order)
        sticks = newest == max(installed.value or (), key=_order)
        yield verdict(
            "warn",
            f"DKMS has no {module} module for {listed(missing)}"
            + (", which starts at the next boot" if sticks else ", which is installed too"),
            evidence,
            installed,
            subject=module,
            severity="medium" if nvidia else "low",
            fix=_build_fix(snapshot, rows[0], newest),
        )
    elif odd:
        yield verdict(
            "warn",
            f"DKMS complains about {module}: {odd[0].note}",
            evidence,
            subject=module,
            fix=_build_fix(snapshot, odd[0], odd[0].kernel or running or "$(uname -r)"),
        )
    else:
        shown = "every installed kernel" if installed.known else f"the running kernel {running}"
        yield verdict("pass", f"DKMS built {module} for {shown}", evidence, subject=module)


def _build_fix(snapshot: Snapshot, one: DkmsState, release: str) -> Fix:
    return Fix(
        "Install the headers of that kernel, build, and read the log where it fails",
        (
            f"apt-get install {_header_package(snapshot, release)}",
            f"dkms install {one.module}/{one.version} -k {release}",
            f"tail -30 /var/lib/dkms/{one.module}/{one.version}/build/make.log",
        ),
    )


def _build_failed(snapshot: Snapshot, one: DkmsState) -> Verdict:
    log = f"/var/lib/dkms/{one.module}/{one.version}/build/make.log"
    kernel = f" on {one.kernel}" if one.kernel else ""
    return verdict(
        "fail",
        f"The DKMS build of {one.module} {one.version} failed{kernel}",
        _row(snapshot, one),
        subject=one.module,
        why="Mostly the driver branch is older than the kernel's interfaces: a newer branch, or an older kernel.",
        fix=Fix(
            "Read the build log, then use a newer driver branch or start an older kernel",
            (
                f"grep -n -m5 -E 'error|Error' {log}",
                f"dkms build {one.module}/{one.version} -k {one.kernel or '$(uname -r)'}",
            ),
        ),
        explains=("F1",) if one.module.startswith("nvidia") else (),
    )


def _no_headers(snapshot: Snapshot, one: DkmsState) -> Verdict:
    release = one.kernel or snapshot.kernel.release.value or ""
    newer = _newer_installed(snapshot)
    package, meta = _header_package(snapshot, release), _header_meta(release)
    pve = is_pve_kernel(release)
    name = (
        f"On Proxmox the package is {package} (or {meta}), not linux-headers-{release}, which DKMS suggests."
        if pve
        else ""
    )
    gone = missing_headers(snapshot, package)
    reboot_first = (
        f"Kernel {newer} is installed and newer: reboot into it first."
        if newer
        else "No configured repository has these headers any more: reboot into the newest installed kernel first."
        if gone
        else (
            "If apt cannot find the package, this kernel is older than the repository: reboot into the newest one "
            "first."
        )
    )
    steps = (
        (
            f"reboot   # into {newer or 'the newest kernel'}",
            f"apt-get install {meta}{_old(release)}",
            "dkms autoinstall",
        )
        if newer or gone
        else (
            f"apt-get update && apt-get install {package}",
            f"# not found: apt-get install {meta}, reboot into the newest kernel, then",
            "dkms autoinstall",
        )
    )
    return verdict(
        "fail",
        f"The headers of kernel {release or 'unknown'} are missing"
        + (" and in no configured repository" if gone else "")
        + f", so DKMS cannot build {one.module or 'a module'}",
        _row(snapshot, one),
        *([snapshot.driver.apt] if gone else []),
        subject=one.module,
        why=f"{reboot_first} {name}".strip(),
        fix=Fix("Get kernel and headers in step, then build again", steps),
        explains=("F1",) if one.module.startswith("nvidia") else (),
    )


def _row(snapshot: Snapshot, one: DkmsState) -> Excerpt:
    fact = snapshot.driver.dkms
    row = f"{one.module}/{one.version} {one.kernel}: {one.state}{f' ({one.note})' if one.note else ''}"
    return Excerpt(fact.source or "dkms.status", fact.excerpt or row)
