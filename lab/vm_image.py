"""What hosts of kind `vm` start from: QEMU in a tree of its own, a Debian disk with a kernel, and saved states.

All of it is kept with the base images, built beside its place and renamed when complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from . import container, image
from .state import Paths
from .system import LabError, Progress, command, require_space

DISTRO = "trixie"
# vfio-user-pci came with QEMU 10.1; Debian 13 itself has 10.0.
BACKPORTS = f"{DISTRO}-backports"
QEMU_PACKAGES = ("qemu-system-x86", "qemu-utils")
GUEST_PACKAGES = ("linux-image-amd64", "initramfs-tools", "lz4", "e2fsprogs", "qemu-guest-agent")
QEMU_RECIPE, GUEST_RECIPE = 1, 3  # raise one when its build below changes
QEMU_MIB, GUEST_MIB = 900, 2500
DISK_SIZE = "6G"  # sparse: about 700 MiB are in use
INSTALL_TIMEOUT_S = 900
TREE_SCRIPT = Path(__file__).with_name("qemu_tree.sh")

# The root disk and the network come over virtio, so the initrd needs only these; lz4 is the quickest to unpack.
_INITRAMFS = {"conf.d/peerlane-lab.conf": "MODULES=list\nCOMPRESS=lz4\n", "modules": "virtio_pci\nvirtio_blk\next4\n"}
_MODPROBE = """\
# Lab host: the GPUs are simulated and answer no driver's questions.
blacklist nouveau
"""
NOTICE = (
    "Peerlane lab host: a disposable virtual machine. Its GPUs are SIMULATED: PCI configuration space, no computing.\n"
)
# On a busy machine a translated guest is too slow for systemd's own 90 s.
_PATIENCE = "[Manager]\nDefaultTimeoutStartSec=15min\n"
TIMERS = tuple(
    f"{name}.timer"
    for name in ("dpkg-db-backup", "e2scrub_all", "fstrim", "logrotate", "man-db", "systemd-tmpfiles-clean")
)
MARKER = "etc/peerlane-lab-simulated"


def qemu_tree(paths: Paths, progress: Progress) -> Path:
    """Return the tree that QEMU runs in, building it where it is missing."""
    base = image.ensure(paths, DISTRO, progress)
    tree = paths.images / f"qemu-{_fingerprint(base, QEMU_PACKAGES, QEMU_RECIPE)}"

    def build(work: Path) -> Path:
        require_space(paths.images, QEMU_MIB, "QEMU for lab hosts of kind vm")
        progress("vm: building a tree with QEMU, once (half a minute, about 30 MB to download)")
        _copy(base, work / "tree")
        mirror = image.this_machine().mirror
        (work / "tree/etc/apt/sources.list.d/backports.sources").write_text(
            f"Types: deb\nURIs: {mirror}\nSuites: {BACKPORTS}\nComponents: main\n"
            "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
        )
        _install(work / "tree", QEMU_PACKAGES, BACKPORTS)
        for folder in ("images", "host"):
            (work / "tree/lab" / folder).mkdir(parents=True)
        return work / "tree"

    return image.built_once(tree, "qemu", build)


def guest_image(paths: Paths, progress: Progress) -> Path:
    """Return the folder with `disk.raw`, `vmlinuz` and `initrd`, building it where it is missing."""
    base = image.ensure(paths, DISTRO, progress)
    folder = paths.images / f"vm-{_fingerprint(base, GUEST_PACKAGES, GUEST_RECIPE)}"

    def build(work: Path) -> Path:
        require_space(paths.images, GUEST_MIB, "the disk for lab hosts of kind vm")
        progress("vm: building a disk with a kernel, once (1-2 minutes, about 120 MB to download)")
        tree = work / "tree"
        _copy(base, tree)
        for name, text in _INITRAMFS.items():
            _put(tree / "etc/initramfs-tools" / name, text)
        _install(tree, GUEST_PACKAGES, DISTRO)
        _configure(tree)
        (work / "ready").mkdir()
        for kernel_file, name in (("vmlinuz", "vmlinuz"), ("initrd.img", "initrd")):
            shutil.copyfile(_only(tree, f"boot/{kernel_file}-*"), work / "ready" / name)
        disk = work / "ready/disk.raw"
        command(["mkfs.ext4", "-q", "-F", "-d", tree, disk, DISK_SIZE], timeout_s=300)
        return work / "ready"

    return image.built_once(folder, "vm", build)


def in_tree(tree: Path, paths: Paths, host_folder: Path, *argv: str) -> list[str]:
    """Return the command that runs a program of QEMU's tree with the base images and a host's folder in its sight."""
    script = ["sh", str(TREE_SCRIPT), str(tree), str(paths.images), str(host_folder)]
    return ["unshare", "--mount", *script, *argv]


def overlay(tree: Path, paths: Paths, host_folder: Path, base: str, kind: str) -> None:
    """Make `disk.qcow2` in a host's folder, which holds what differs from `base` (a path as QEMU sees it)."""
    words = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", kind, "/lab/host/disk.qcow2"]
    command(in_tree(tree, paths, host_folder, *words))


def _fingerprint(base: Path, packages: tuple[str, ...], recipe: int) -> str:
    return hashlib.sha256(repr((base.name, packages, recipe)).encode()).hexdigest()[:8]


def _copy(base: Path, tree: Path) -> None:
    command(["cp", "-a", "--reflink=auto", base, tree], timeout_s=300)
    resolv = tree / "etc/resolv.conf"
    resolv.unlink(missing_ok=True)
    resolv.write_text(container.nameservers(), encoding="utf-8")


def _install(tree: Path, packages: tuple[str, ...], suite: str) -> None:
    """Install packages in a tree; /proc is mounted for as long as that takes."""
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    enter = ["unshare", "--mount", "sh", "-c", 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"', str(tree)]
    command([*enter, "apt-get", "update"], timeout_s=300, env=quiet)
    words = ["apt-get", "install", "-y", "--no-install-recommends", "-t", suite, *packages]
    command([*enter, *words], timeout_s=INSTALL_TIMEOUT_S, env=quiet)
    command([*enter, "apt-get", "clean"], env=quiet)


def _configure(tree: Path) -> None:
    """Give the disk what all hosts of the kind share."""
    _put(tree / "etc/fstab", "/dev/vda / ext4 defaults,noatime 0 1\n")
    _put(tree / "etc/modprobe.d/peerlane-lab.conf", _MODPROBE)
    _put(tree / "etc/systemd/system.conf.d/peerlane-lab.conf", _PATIENCE)
    for name in (MARKER, "etc/motd"):
        _put(tree / name, NOTICE)
    (tree / "etc/ssh/ssh_host_ed25519_key").unlink(missing_ok=True)
    # Replaced in each host before it is reachable; sshd does not start without one.
    command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", tree / "etc/ssh/ssh_host_ed25519_key"])
    # A restored guest's clock jumps; what these timers start would then run at once, for minutes.
    command(["chroot", tree, "systemctl", "mask", *TIMERS])
    # As with the container kind: without package lists, and so old that the first "update if it is old" updates.
    shutil.rmtree(tree / "var/lib/apt/lists")
    (tree / "var/lib/apt/lists/partial").mkdir(parents=True)
    os.utime(tree / "var/lib/apt/lists", (0, 0))


def _put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _only(tree: Path, pattern: str) -> Path:
    found = sorted(tree.glob(pattern))
    if len(found) != 1:
        raise LabError(f"the disk for kind vm has {len(found)} files {pattern}, not one")
    return found[0]
