"""Rules F9 to F12: the fabric manager, NVLink, RDMA and unified memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..core.finding import Excerpt, Fix, Gain
from ..core.snapshot import FabricReport, Fact, NvLinks, PciFunction, Snapshot
from .common import counted, has_no_gpu, in_container, kernel_version, listed
from .gpu_views import excerpt, label, labels, module_flavour, no_gpu
from .knowledge import version, version_text
from .registry import Fleet, Verdict, rule, verdict

# --- F9: fabric manager ---------------------------------------------------------------------------------------------

_FABRIC = "nvidia-fabricmanager"
_PIN = (
    "# one repository for driver and fabric manager, e.g. /etc/apt/preferences.d/nvidia:",
    "#   Package: nvidia-* libnvidia-* cuda-drivers* nvidia-fabricmanager-*",
    "#   Pin: origin developer.download.nvidia.com",
    "#   Pin-Priority: 1001",
)


def nvswitches(snapshot: Snapshot) -> tuple[PciFunction, ...]:
    """Return the NVSwitches on the bus (NVIDIA bridges of class 0680)."""
    functions = snapshot.pci.functions.value or {}
    return tuple(one for one in functions.values() if one.is_nvidia and one.class_code == "0680")


@rule(
    "F9",
    "fabric-manager",
    title="On a machine with NVSwitches the fabric manager runs, in the driver's own version",
    roles=("bare_metal", "guest"),
    severity="critical",
    looks_at=("systemctl.fabricmanager", "systemctl.nvidia_units", "lspci.vvv", "sysfs.pci", "nvidia_smi.q", "dpkg"),
    why=(
        "Without a working fabric manager CUDA answers 802 (system not yet initialized), though nvidia-smi looks "
        "healthy; the driver does not fall back to PCIe there."
    ),
    restart="service",
    automation="ask",
    risk="Ends programs that use NVLink.",
    verify="systemctl is-active nvidia-fabricmanager; nvidia-smi -q | grep -A2 Fabric   # Completed, Success",
    sources=("NVIDIA fabric manager user guide", "gpu-operator issues 544 and 610", "recorded version mismatches"),
    without_role=True,
)
def _fabric_manager(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    manager = snapshot.driver.fabric_manager
    reports = manager.value or ()
    switches = nvswitches(snapshot)
    mismatch = [one for one in reports if one.driver_version and one.driver_version != one.version]
    own = _own_version(snapshot, reports)
    driver = _driver_version(snapshot)
    if not mismatch and own and driver and own.version != driver and (switches or own.state == "active"):
        mismatch = [FabricReport(own.version, driver, own.state, source=own.source)]
    if mismatch:
        yield from _mismatched(snapshot, mismatch)
        return
    if any(one.nothing_to_do for one in reports) and not switches:
        yield verdict(
            "info", "The fabric manager found no NVSwitch and has nothing to do: it is not needed here", manager
        )
        return
    state = next((one.state for one in reports if one.state), "")
    fabric = [gpu for gpu in snapshot.gpus.value or () if gpu.fabric_state]
    done = [gpu for gpu in fabric if gpu.fabric_state == "Completed" and gpu.fabric_status in (None, "Success")]
    if switches or (snapshot.driver.not_ready.known and not _surely_none(snapshot)):
        yield from _needed(snapshot, switches, state, fabric, done)
    elif fabric and len(done) < len(fabric):
        rest = [gpu for gpu in fabric if gpu not in done]
        yield verdict(
            "fail",
            f"The NVLink fabric of {labels(rest)} is not ready: {rest[0].fabric_state}"
            + (f", {rest[0].fabric_status}" if rest[0].fabric_status else ""),
            excerpt(snapshot, rest, lambda gpu: f"Fabric State {gpu.fabric_state}, Status {gpu.fabric_status}"),
            fix=_start(),
            explains=("F10", "D5"),
        )
    elif has_no_gpu(snapshot):
        yield no_gpu()
    elif _surely_none(snapshot):
        yield verdict(
            "not_applicable", "There is no NVSwitch here", reason="no NVSwitch on the bus: no fabric manager is needed"
        )
    else:
        reason = snapshot.pci.functions.reason or "the list of PCI functions is only a part"
        yield verdict("unknown", "Whether the machine has NVSwitches is not known", reason=reason)


def _surely_none(snapshot: Snapshot) -> bool:
    return snapshot.pci.functions.known and snapshot.pci.complete and not nvswitches(snapshot)


def _driver_version(snapshot: Snapshot) -> str:
    smi = snapshot.driver.smi.value
    return snapshot.driver.loaded_version.value or (smi.driver_version if smi else None) or ""


def _own_version(snapshot: Snapshot, reports: Sequence[FabricReport]) -> FabricReport | None:
    """Return the fabric manager's version: what it says itself, else its package."""
    told = next((one for one in reports if one.version), None)
    if told:
        return told
    for name, package in (snapshot.driver.packages.value or {}).items():
        found = re.match(r"(\d+(?:\.\d+)+)", package.version)
        if name.startswith(_FABRIC) and "dev" not in name and package.state[1:2] == "i" and found:
            state = next((one.state for one in reports if one.state), "")
            return FabricReport(found[1], "", state, source=snapshot.driver.packages.source)
    return None


def _mismatched(snapshot: Snapshot, mismatch: Sequence[FabricReport]) -> Iterator[Verdict]:
    pairs = [f"{one.version} with driver {one.driver_version}" for one in mismatch]
    state = next((one.state for one in mismatch if one.state), "")
    close = [one for one in mismatch if one.version.split(".")[0] == one.driver_version.split(".")[0]]
    yield verdict(
        "fail",
        f"The fabric manager does not match the driver: {listed(pairs, 4)}" + (f" ({state})" if state else ""),
        snapshot.driver.fabric_manager,
        snapshot.driver.not_ready,
        Excerpt(mismatch[0].source or "dpkg", "\n".join(f"fabric manager {pair}" for pair in pairs)),
        why=(
            "Both must be the same to the last digit"
            + ("; the same branch is not enough. " if close else ". ")
            + "Until then CUDA answers 802 (system not yet initialized), though nvidia-smi looks healthy."
        ),
        fix=Fix(
            "Install both from one repository, in one version, and pin them together",
            (
                "apt-cache policy nvidia-fabricmanager-BRANCH nvidia-driver-BRANCH",
                "apt-get install nvidia-fabricmanager-BRANCH=VERSION   # the driver's version, to the last digit",
                "systemctl restart nvidia-fabricmanager",
                *_PIN,
            ),
        ),
        explains=("F10", "D5"),
    )
    if close:
        yield verdict(
            "info",
            "Driver and fabric manager come from different repositories or dates: a pin has to cover "
            "nvidia-fabricmanager-* too",
            snapshot.driver.fabric_manager,
            subject="packages",
        )


def _needed(
    snapshot: Snapshot,
    switches: Sequence[PciFunction],
    state: str,
    fabric: Sequence[object],
    done: Sequence[object],
) -> Iterator[Verdict]:
    manager, not_ready = snapshot.driver.fabric_manager, snapshot.driver.not_ready
    shown = Excerpt(
        snapshot.pci.functions.source or "lspci.vvv",
        "\n".join(f"{one.bdf} 10de:{one.device} {one.name}" for one in switches[:8]),
    )
    here = f"{counted(len(switches), 'NVSwitch').replace('NVSwitchs', 'NVSwitches')} on the bus"
    evidence: list[Fact[Any] | Excerpt] = [*([shown] if switches else []), manager, not_ready]
    if state in ("failed", "inactive", "not-found") or state.startswith("exited"):
        words = {"not-found": "is not installed", "inactive": "does not run"}.get(state, f"failed ({state})")
        first = here if switches else "CUDA says 802"
        yield verdict("fail", f"{first}, but nvidia-fabricmanager {words}", *evidence, fix=_start())
    elif not_ready.known:
        yield verdict(
            "fail",
            "CUDA says 802 (system not yet initialized): on a machine with NVSwitches the fabric is not ready",
            *evidence,
            fix=_start(),
        )
    elif fabric and len(done) < len(fabric):
        yield verdict("fail", f"{here}, but the NVLink fabric is not ready on every GPU", *evidence, fix=_start())
    elif state == "active" and (not fabric or done):
        yield verdict("pass", f"{here}, and nvidia-fabricmanager runs", *evidence)
    elif fabric:
        yield verdict("pass", f"{here}, and the fabric state is Completed", *evidence)
    else:
        yield verdict(
            "info",
            f"{here}: nvidia-fabricmanager must be installed, run, and have the driver's version to the last digit",
            *evidence,
        )
        yield verdict("unknown", "Whether the fabric manager runs is not known", shown, reason=manager.reason)


def _start() -> Fix:
    return Fix(
        "Install the fabric manager in the driver's version and start it",
        (
            "cat /proc/driver/nvidia/version",
            "apt-get install nvidia-fabricmanager-BRANCH=VERSION   # the driver's version, to the last digit",
            "systemctl enable --now nvidia-fabricmanager",
            "journalctl -u nvidia-fabricmanager -n 30",
        ),
    )


# --- F10: NVLink ----------------------------------------------------------------------------------------------------

# Cards that two can be bridged of, and that work without a bridge too.
_BRIDGEABLE = re.compile(r"RTX 3090(?! Ti Laptop)|RTX A[456]\d00|A40\b|RTX 2080 Ti|TITAN RTX|Quadro RTX [68]000")
# Cards with several bridges, of which one may be left out.
_SEVERAL_BRIDGES = re.compile(r"\b(?:A100|A800|H100|H200|A30|H800)\b.*\b(?:PCIe|NVL)|A30\b")
_NO_MIG_LINKS = re.compile(r"not supported for devices in MIG", re.IGNORECASE)


@rule(
    "F10",
    "nvlink",
    title="Every NVLink that is there is active",
    roles=("bare_metal", "guest"),
    severity="high",
    looks_at=("nvidia_smi.nvlink_s", "nvidia_smi.topo_m"),
    why="A link that is down halves a bridge, or takes a GPU out of the NVLink fabric; PCIe or nothing is left then.",
    restart="reboot",
    automation="never",
    risk="Reseating a bridge needs the machine switched off; every model on it stops.",
    verify="nvidia-smi nvlink -s",
    sources=("nvidia-smi manual", "club-3090"),
    gain=Gain("decode +3 to 5, prefill +35 to 49", "%", "club-3090, a bridge between two RTX 3090: not repeated here"),
    without_role=True,
)
def _nvlink(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    links = snapshot.driver.nvlinks
    if links.value is None:
        if has_no_gpu(snapshot):
            yield no_gpu()
        else:
            yield verdict("unknown", "Whether NVLinks are active is not known", reason=links.reason)
        return
    gpus = links.value
    if any(_NO_MIG_LINKS.search(one.note) for one in gpus):
        yield verdict(
            "not_applicable", "No NVLink with MIG", links, reason="NVLink queries are not supported in MIG mode (F13)"
        )
        return
    live = [one for one in gpus if _active(one)]
    dead = [one for one in gpus if one.gpu >= 0 and not _active(one) and (one.links or "inactive" in one.note.lower())]
    if not live:
        yield from _none_active(snapshot, gpus, dead)
        return
    if dead:
        yield verdict(
            "fail",
            f"GPU {listed([str(one.gpu) for one in dead])} has no active NVLink, while "
            f"GPU {listed([str(one.gpu) for one in live], 8)} has",
            links,
            fix=_look_at_links(),
            explains=("D5",),
        )
        return
    partial = [one for one in live if _active(one) < len(one.links)]
    counts = {_active(one) for one in live}
    if partial:
        several = all(_SEVERAL_BRIDGES.search(one.name) for one in partial) and len(counts) == 1
        shown = listed([f"GPU {one.gpu}: {_active(one)} of {len(one.links)}" for one in partial], 8)
        if several:
            yield verdict("info", f"Not every NVLink is bridged ({shown}); one bridge may be left out", links)
        else:
            yield verdict("fail", f"Some NVLinks are inactive ({shown})", links, fix=_look_at_links())
        return
    wide = _widest(snapshot)
    if wide > min(counts):
        yield verdict(
            "warn",
            f"The topology names NV{wide}, but a GPU has {min(counts)} active NVLinks",
            links,
            snapshot.topology,
            fix=_look_at_links(),
        )
        return
    rates = sorted({rate for one in live for rate in one.links.values() if rate})
    told = listed([f"{rate:g}" for rate in rates])
    yield verdict(
        "pass",
        f"All NVLinks are active: {listed([str(one) for one in sorted(counts)])} a GPU at {told} GB/s",
        links,
    )


def _active(one: NvLinks) -> int:
    return sum(1 for rate in one.links.values() if rate)


def _widest(snapshot: Snapshot) -> int:
    topology = snapshot.topology.value
    codes = topology.links.values() if topology else ()
    return max((int(code[2:]) for code in codes if code.startswith("NV") and code[2:].isdigit()), default=0)


def _none_active(snapshot: Snapshot, gpus: Sequence[NvLinks], dead: Sequence[NvLinks]) -> Iterator[Verdict]:
    links = snapshot.driver.nvlinks
    names = [one.name for one in gpus if one.name] or [gpu.name for gpu in snapshot.gpus.value or ()]
    if nvswitches(snapshot) or (any("SXM" in name for name in names) and len(names) > 1 and dead):
        yield verdict(
            "fail",
            "No NVLink is active on a machine that has them",
            links,
            fix=_look_at_links(),
            explains=("D5",),
        )
    elif len(names) > 1 and all(_BRIDGEABLE.search(name) for name in names):
        yield verdict(
            "info",
            f"No NVLink bridge between the {counted(len(names), 'GPU')} ({names[0]}): two of them can be bridged",
            links,
        )
    elif dead:
        yield verdict(
            "info", f"No NVLink is active on {counted(len(dead), 'GPU')}: no bridge, or links that are off", links
        )
    else:
        yield verdict("not_applicable", "These GPUs have no NVLink", links, reason="nvidia-smi lists no link")


def _look_at_links() -> Fix:
    return Fix(
        "Look at the bridge or the fabric, then reset the GPUs",
        (
            "nvidia-smi nvlink -s",
            "nvidia-smi nvlink -e   # error counters",
            "dmesg | grep -E 'Xid.*: (74|1[34][0-9]|150)'",
            "nvidia-smi --gpu-reset   # all linked GPUs, idle; then power off and seat the bridge anew",
        ),
        risk="The reset ends every program on the linked GPUs.",
    )


# --- F11: RDMA ------------------------------------------------------------------------------------------------------


@rule(
    "F11",
    "nvidia-peermem",
    title="Network cards can reach GPU memory where RDMA is used",
    roles=("bare_metal", "guest"),
    severity="medium",
    looks_at=("proc.modules", "lspci.vvv", "sysfs.pci", "nvidia_smi.topo_m"),
    why=(
        "RDMA into GPU memory needs the module nvidia_peermem, or dma-buf (kernel 5.12 and the open modules). It has "
        "nothing to do with P2P between GPUs."
    ),
    restart="service",
    automation="ask",
    risk="Loads a kernel module.",
    verify="lsmod | grep -E 'nvidia_peermem|ib_core'",
    sources=("NVIDIA GPUDirect RDMA documentation",),
    without_role=True,
)
def _peermem(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    if has_no_gpu(snapshot):
        yield no_gpu()
        return
    functions = (snapshot.pci.functions.value or {}).values()
    cards = [one for one in functions if one.vendor == "15b3" and (one.class_code or "").startswith("02")]
    topology = snapshot.topology.value
    if not cards and not (topology and topology.nics):
        if snapshot.pci.functions.known and snapshot.pci.complete:
            yield verdict("not_applicable", "No RDMA card", reason="no Mellanox or NVIDIA network card on the bus")
        else:
            reason = snapshot.pci.functions.reason or "the list of PCI functions is only a part"
            yield verdict("unknown", "Whether there is an RDMA card is not known", reason=reason)
        return
    number = len(cards) or len(topology.nics if topology else ())
    here = counted(number, "RDMA card")
    modules = snapshot.kernel.modules
    flavour = module_flavour(snapshot)
    new = bool(kernel_version(snapshot)) and kernel_version(snapshot) >= version("kernel.dma_buf")
    if "nvidia_peermem" in (modules.value or {}):
        yield verdict("pass", f"{here}, and nvidia_peermem is loaded", modules)
    elif flavour.value == "open" and new:
        yield verdict(
            "pass",
            f"{here}; the open modules on kernel {version_text('kernel.dma_buf')} or newer offer dma-buf",
            flavour,
            snapshot.kernel.release,
        )
    elif "nvidia" not in (modules.value or {}):
        # A module stands in the list before those it needs: without nvidia the list may be cut.
        reason = modules.reason or "the list of modules does not reach nvidia"
        yield verdict("unknown", f"{here}; whether nvidia_peermem is loaded is not known", reason=reason)
    elif flavour.known and (flavour.value != "open" or kernel_version(snapshot)):
        yield verdict(
            "warn",
            f"{here}, but neither nvidia_peermem nor dma-buf: network traffic of GPUs goes through host memory",
            modules,
            flavour,
            severity="medium",
            fix=Fix(
                "Load nvidia_peermem, at every boot",
                ("modprobe nvidia_peermem", "echo nvidia_peermem > /etc/modules-load.d/nvidia-peermem.conf"),
            ),
        )
    else:
        yield verdict(
            "unknown",
            f"{here} without nvidia_peermem; whether dma-buf is offered is not known",
            modules,
            reason=flavour.reason or snapshot.kernel.release.reason,
        )


# --- F12: unified memory --------------------------------------------------------------------------------------------

_HMM_MODELS = re.compile(r"RTX PRO 6000")


@rule(
    "F12",
    "uvm-loaded-and-hmm",
    title="The unified memory module is loaded and has its device node",
    roles=("bare_metal", "guest"),
    severity="medium",
    looks_at=("proc.modules", "nvidia_devices", "nvidia_uvm.parameters"),
    why="CUDA does not start without nvidia_uvm (error 999 or 802), and NCCL needs it from 2.23 on.",
    restart="service",
    automation="ask",
    risk="Loads a kernel module; turning HMM off needs a reload of the driver or a reboot.",
    verify="ls -l /dev/nvidia-uvm; cat /sys/module/nvidia_uvm/parameters/uvm_disable_hmm",
    sources=("CUDA error codes", "rtx6kpro (HMM)"),
    without_role=True,
)
def _uvm(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    modules, nodes = snapshot.kernel.modules, snapshot.driver.device_nodes
    loaded = set(modules.value or {})
    names = set(nodes.value or ())
    unloaded = modules.known and "nvidia" in loaded and "nvidia_uvm" not in loaded and not in_container(snapshot)
    no_node = nodes.known and "nvidia0" in names and "nvidia-uvm" not in names
    if unloaded or no_node:
        what = "The module nvidia_uvm is not loaded" if unloaded else "/dev/nvidia-uvm is not there"
        yield verdict(
            "fail",
            f"{what}: CUDA cannot start",
            *([modules] if unloaded else []),
            *([nodes] if no_node else []),
            fix=Fix(
                "Load it and make its device node, at every boot",
                (
                    "nvidia-modprobe -u -c=0",
                    "echo nvidia_uvm > /etc/modules-load.d/nvidia-uvm.conf",
                    *(("# in a container: pass /dev/nvidia-uvm to it",) if in_container(snapshot) else ()),
                ),
            ),
        )
        return
    here = "nvidia_uvm" in loaded or "nvidia-uvm" in names
    if here:
        evidence = nodes if "nvidia-uvm" in names else modules
        yield verdict("pass", "The unified memory module is there", evidence)
        yield from _hmm(snapshot)
    elif has_no_gpu(snapshot):
        yield no_gpu()
    elif modules.known and "nvidia" not in loaded and not in_container(snapshot):
        yield verdict(
            "not_applicable", "The NVIDIA driver is not loaded", modules, reason="rule F1 says why; this comes after"
        )
    else:
        reason = nodes.reason if in_container(snapshot) else modules.reason or nodes.reason
        yield verdict("unknown", "Whether the unified memory module is loaded is not known", reason=reason)


def _hmm(snapshot: Snapshot) -> Iterator[Verdict]:
    hmm = snapshot.driver.uvm_hmm_disabled
    gpus = [gpu for gpu in snapshot.gpus.value or () if _HMM_MODELS.search(gpu.name)]
    if hmm.value is False and len(gpus) > 1:
        yield verdict(
            "info",
            f"HMM is on with {counted(len(gpus), 'GPU')} like {label(gpus[0])}; one project turns it off against hangs "
            "(options nvidia_uvm uvm_disable_hmm=1)",
            hmm,
            subject="hmm",
        )
