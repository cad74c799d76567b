"""Judge a host after a driver was installed, and find the way back where that failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..parse import dkms
from . import apt_text
from .apt_text import is_driver_package, upstream
from .driver_plan import SIGNED, Host, host, lead_package


@dataclass(frozen=True)
class Result:
    """What is really there after an installation."""

    version: str = ""
    installed: bool = False  # unpacked and configured
    built: tuple[str, ...] = ()  # kernels that have the module
    missing: tuple[dict[str, str], ...] = ()  # {module, version, kernel, state}: DKMS knows it, the kernel lacks it
    failures: tuple[str, ...] = ()  # one line for each kernel without a module
    ways_out: tuple[str, ...] = ()
    unheld: tuple[str, ...] = ()
    reboot_required: bool = False
    reboot_reason: str = ""
    unproven: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain types for Ansible."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def result(facts: Mapping[str, Any], made: Mapping[str, Any]) -> Result:
    """Judge the host after the installation of the plan ``made`` (of ``Plan.as_dict``)."""
    here = host(facts)
    lead = here.packages.get(lead_package(made["packages"]))
    version = upstream(lead.version) if lead else str(made["version"])
    states = [one for one in here.dkms if one.version == version and one.module.startswith("nvidia")]
    name = states[0].module if states else ""
    built: list[str] = []
    missing: list[dict[str, str]] = []
    failures: list[str] = []
    if made["modules"] == "dkms" and lead:
        for kernel in made["kernels"]:
            mine = next((one for one in states if one.kernel == kernel), None)
            if mine and mine.state == "installed" and not mine.note.startswith("WARNING"):
                built.append(kernel)
                continue
            state = f"{mine.state} {mine.note}".strip() if mine else "added" if states else "not known to DKMS"
            missing.append({"module": name, "version": version, "kernel": kernel, "state": state})
            path, log = dkms.log_of(facts["make_logs"], name, version, kernel)
            why = dkms.cause(log) or ("not tried after the failure above" if failures else "no build log says why")
            failures.append(
                f"DKMS has no {name or 'nvidia'}/{version} for kernel {kernel} (state: {state}): {why}"
                + (f" [{path}]" if path else "")
            )
    for name in made["packages"] if made["modules"] == "signed" and lead else ():
        if not name.startswith(SIGNED):
            continue
        signed = here.packages.get(name)
        kernel = next((one for one in made["kernels"] if name.endswith(f"-{one}")), name)
        if signed and signed.complete:
            built.append(kernel)
        else:
            failures.append(f"kernel {kernel} has no signed modules: {name} is not installed")
    driver = [
        key
        for key, one in here.packages.items()
        if is_driver_package(key) and (upstream(one.version) == version or key.startswith(SIGNED))
    ]
    unheld = sorted(key for key in driver if key not in here.holds)
    reboot = bool(here.loaded_version and here.loaded_version != version)
    reason = f"kernel module {here.loaded_version} is loaded, {version} is installed" if reboot else ""
    if here.gpus and not here.loaded_version and not here.container:
        reboot = True
        other = f" ({', '.join(here.other_drivers)} has the GPU)" if here.other_drivers else ""
        reason = f"the NVIDIA kernel module is not loaded yet{other}"
    return Result(
        version=version if lead else "",
        installed=lead is not None and lead.complete,
        built=tuple(built),
        missing=tuple(missing),
        failures=tuple(failures),
        ways_out=_ways_out(here, made) if failures else (),
        unheld=tuple(unheld),
        reboot_required=reboot,
        reboot_reason=reason,
        unproven=_unproven(here, made),
    )


def _unproven(here: Host, made: Mapping[str, Any]) -> tuple[str, ...]:
    found = []
    if not made["kernels"]:
        found.append("no kernel is installed here, so no module was built")
    if here.container:
        found.append("a container loads no kernel modules")
    if not here.gpus:
        found.append("there is no GPU to drive")
    elif here.loaded_version == "":
        found.append("the module was not loaded yet")
    return tuple(found)


def _ways_out(here: Host, made: Mapping[str, Any]) -> tuple[str, ...]:
    others = [name for name in ("nvidia", "ubuntu", "debian") if name not in (made["source"],)]
    others = [name for name in others if name == "nvidia" or name == here.distribution]
    ways = [f"nvidia_driver_source: {name} (another build of the driver)" for name in others]
    if made["source"] != "debian":
        ways.append("nvidia_driver_branch: a newer branch, which knows the newer kernel")
    ways.append("nvidia_driver_patches: a patch that the role hands to DKMS (its README lists the known ones)")
    ways.append("an older kernel whose headers are in the archive; name the new one in nvidia_driver_ignored_kernels")
    return tuple(ways)


def rollback(before: Mapping[str, Any], after: Mapping[str, Any], planned: Sequence[str]) -> dict[str, list[str]]:
    """Return what brings the packages back to ``before``: names to purge, and ``name=version`` to put back.

    Only NVIDIA packages and what the plan named are touched. Compilers and kernel headers that came along stay: they
    are complete, and the next attempt needs them.
    """
    was = apt_text.installed(before["packages"])
    now = apt_text.installed(after["packages"])
    named = {one.partition("=")[0] for one in planned}
    purge, restore = [], []
    for name, one in sorted(now.items()):
        if not (is_driver_package(name) or "nvidia" in name or (name in named and one.broken)):
            continue
        old = was.get(name)
        if old is None or (old.broken and one.broken):
            purge.append(name)
        elif old.complete and (old.version != one.version or one.broken):
            restore.append(f"{name}={old.version}")
    return {"purge": purge, "restore": restore}
