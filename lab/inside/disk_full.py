"""Runs inside a lab host as root: `on PATH MIB` leaves MIB MiB of room under PATH, `off` gives it all back.

An overlay over PATH sends all writes to a tmpfs of that size: what was there stays visible, and the kernel answers
ENOSPC when the tmpfs is full. `off` moves what was written to where it belongs.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

TOP = Path("/run/peerlane-lab")
AREA = TOP / "disk"
COVERED = TOP / "disk-path"


def put_on(path: Path, mib: int) -> None:
    """Cover `path`."""
    path.mkdir(parents=True, exist_ok=True)
    AREA.mkdir(parents=True)
    run("mount", "-t", "tmpfs", "-o", f"size={mib}M,mode=0755", "tmpfs", AREA)
    upper, work, owner = AREA / "upper", AREA / "work", path.stat()
    upper.mkdir()
    work.mkdir()
    upper.chmod(stat.S_IMODE(owner.st_mode))
    os.chown(upper, owner.st_uid, owner.st_gid)
    run("mount", "-t", "overlay", "overlay", "-o", f"lowerdir={path},upperdir={upper},workdir={work}", path)
    COVERED.write_text(str(path), encoding="utf-8")


def take_off() -> None:
    """Uncover the path and move into it what was written meanwhile."""
    if COVERED.exists():
        path = Path(COVERED.read_text(encoding="utf-8"))
        run("umount", "--lazy", path)
        merge(AREA / "upper", path)
        COVERED.unlink()
    if AREA.is_mount():
        run("umount", "--lazy", AREA)
    if AREA.exists():
        AREA.rmdir()


def merge(upper: Path, lower: Path) -> None:
    """Apply an overlay's upper directory to the directory under it: new, changed and deleted entries."""
    for entry in upper.iterdir():
        target = lower / entry.name
        status = entry.lstat()
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            remove(target)
        elif stat.S_ISDIR(status.st_mode):
            if "trusted.overlay.opaque" in os.listxattr(entry) or not target.is_dir() or target.is_symlink():
                remove(target)
                target.mkdir()
            merge(entry, target)
            os.chown(target, status.st_uid, status.st_gid)
            target.chmod(stat.S_IMODE(status.st_mode))
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
        else:
            remove(target)
            shutil.copy2(entry, target, follow_symlinks=False)
            os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)


def remove(path: Path) -> None:
    """Remove a file, a link or a tree, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def run(*words: str | Path) -> None:
    """Run a program that shows its own error."""
    if subprocess.run(words, check=False).returncode != 0:
        sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1] == "on":
        put_on(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        take_off()
