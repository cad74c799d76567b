"""What outputs of apt show, for the rules on the driver's packages (F2, F3, H4)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..core.finding import Excerpt, Fix
from ..core.snapshot import AptOutput, Snapshot, Unmet
from .common import listed
from .knowledge import version_tuple
from .registry import Verdict, verdict

# Which Debian or Ubuntu release first has a libc6 of this version.
_LIBC_RELEASES = (
    ((2, 41), "Debian 13 or Ubuntu 25.04"),
    ((2, 39), "Ubuntu 24.04"),
    ((2, 38), "Ubuntu 23.10"),
    ((2, 36), "Debian 12"),
    ((2, 35), "Ubuntu 22.04"),
    ((2, 34), "Ubuntu 21.10"),
    ((2, 31), "Debian 11 or Ubuntu 20.04"),
)
_NVIDIA = re.compile(r"nvidia|cuda|libnv|nccl")
_FLAVOUR = re.compile(r"nvidia-(?:dkms|driver|kernel-source)-(\d{3,})(?:-server)?(-open)?$")
_DESKTOP = re.compile(r"libgtk|librsvg|mesa-vdpau|screen-resolution|xserver-xorg|nvidia-settings|pkexec|switcheroo|x11")


def _excerpt(snapshot: Snapshot) -> Excerpt:
    return Excerpt(snapshot.driver.apt.source or "apt.output", snapshot.driver.apt.excerpt)


def conflicts(snapshot: Snapshot) -> Iterator[Verdict]:
    """Say which packages apt cannot bring together, and why: another release's repository, or two repositories."""
    unmet = [one for output in snapshot.driver.apt.value or () for one in output.unmet]
    libc = [one for one in unmet if one.wants in ("libc6", "libc-bin") and one.instead[:1].isdigit()]
    if libc:
        yield _other_release(snapshot, unmet, libc)
        return
    mixed = [one for one in unmet if _NVIDIA.search(one.wants) and one.instead[:1].isdigit()]
    if mixed:
        yield _mixed(snapshot, mixed)


def _other_release(snapshot: Snapshot, unmet: Sequence[Unmet], libc: Sequence[Unmet]) -> Verdict:
    wanted = max((_version_of(one.condition) for one in libc), key=version_tuple)
    here = libc[0].instead
    release = next((name for lowest, name in _LIBC_RELEASES if version_tuple(wanted) >= lowest), "")
    missing = sorted({f"{one.wants} ({one.condition})" for one in unmet if "not installable" in one.instead})
    also = f"; {listed(missing)} cannot be installed at all" if missing else ""
    return verdict(
        "fail",
        f"An apt source belongs to another release: packages need libc6 {wanted} or newer"
        + (f" (as in {release})" if release else "")
        + f", and {here} is installed{also}",
        _excerpt(snapshot),
        subject="packages",
        why="libc6 cannot be newer than the release; packages built for a newer one never fit.",
        fix=Fix(
            "Remove that repository, and add the one for this release",
            (
                "cat /etc/os-release",
                "grep -rn '^[^#]' /etc/apt/sources.list /etc/apt/sources.list.d/",
                "# delete the file of the other release, then",
                "apt-get update && apt-get install --fix-broken",
            ),
        ),
    )


def _mixed(snapshot: Snapshot, mixed: Sequence[Unmet]) -> Verdict:
    one = mixed[0]
    wanted = _version_of(one.condition)
    broken = sorted({row.package for row in mixed if row.package})
    return verdict(
        "fail",
        f"NVIDIA packages come from mixed repositories: {listed(broken)}: {one.wants} ({one.condition or wanted}) is "
        f"wanted, and apt would install {one.instead}",
        _excerpt(snapshot),
        subject="packages",
        why=(
            "Two repositories offer the same package names in different versions (…-0ubuntu1 is NVIDIA's CUDA "
            "repository, …-0ubuntu0.22.04.x the distribution): one must win for all of them."
        ),
        fix=Fix(
            "Pin all NVIDIA packages to one origin, then repair",
            (
                f"apt-cache policy {one.wants}",
                "# /etc/apt/preferences.d/nvidia: Package: nvidia-* libnvidia-* cuda-drivers*",
                "#   Pin: release o=Ubuntu (or: origin developer.download.nvidia.com), Pin-Priority: 1001",
                "apt-get update && apt-get install --fix-broken",
            ),
        ),
    )


def _version_of(condition: str) -> str:
    found = re.search(r"\d[\w.+~:-]*", condition)
    return found[0] if found else ""


def flavour_flip(snapshot: Snapshot) -> Iterator[Verdict]:
    """Say where apt would install the other flavour of the modules in the run that removes one."""
    for output in snapshot.driver.apt.value or ():
        coming = [*dict.fromkeys((*output.new, *output.additional))]
        into, out = _flavours(coming), _flavours(output.removed)
        flips = [name for name in into if not set(into[name]) & set(out.get(name, ())) and out.get(name)]
        if flips or _opposite(into, out):
            yield _flip(snapshot, output, [name for name in coming if _FLAVOUR.match(name)])
            desktop = [name for name in coming if _DESKTOP.match(name)]
            if desktop:
                yield verdict(
                    "info",
                    f"Desktop packages come with it ({listed(desktop, 3)}): use --no-install-recommends, or the "
                    "-server or -headless packages",
                    _excerpt(snapshot),
                    subject="recommended packages",
                )


def _flavours(names: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        hit = _FLAVOUR.match(name)
        if hit:
            found.setdefault(hit[1], []).append("open" if hit[2] else "proprietary")
    return found


def _opposite(into: dict[str, list[str]], out: dict[str, list[str]]) -> bool:
    coming = {flavour for ones in into.values() for flavour in ones}
    leaving = {flavour for ones in out.values() for flavour in ones}
    return bool(coming and leaving and not coming & leaving)


def _flip(snapshot: Snapshot, output: AptOutput, coming: Sequence[str]) -> Verdict:
    gone = [name for name in output.removed if _FLAVOUR.match(name)]
    return verdict(
        "warn",
        f"apt would not only remove {listed(gone, 3)}: it would install {listed(coming, 3)} in the same run",
        _excerpt(snapshot),
        subject="packages",
        severity="medium",
        why=(
            "What stays installed depends on one flavour of the kernel modules or the other, so apt replaces instead "
            "of removing. Read the list of NEW packages before you agree."
        ),
        fix=Fix(
            "Name every NVIDIA package in the run that removes, and look at the plan first",
            (
                "apt-get -s purge '*nvidia*' | grep -E '^(Inst|Remv|Purg)'   # -s: only shows",
                "# a change of flavour on purpose: install the other flavour in one run, e.g. nvidia-driver-NNN-open",
            ),
            restart="reboot",
        ),
    )


def missing_headers(snapshot: Snapshot, package: str) -> bool:
    """Whether apt said that no repository has this package of headers, or any package of headers of its kernel."""
    lost = [name for output in snapshot.driver.apt.value or () for name in output.not_found]
    kernel = package.partition("headers-")[2]
    return any(name == package or (kernel and name.endswith(f"headers-{kernel}")) for name in lost)
