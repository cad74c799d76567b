"""A signed apt repository in the layout of NVIDIA's network repository, for the lab: simulated, no NVIDIA file in it.

The packages have the real names, versions and dependencies that matter to an installation, and next to nothing inside.
Their descriptions say that they are simulated. The layout is flat (``Packages``, ``Release``, ``InRelease`` and the
``.deb`` files in one folder, suite ``/``), as NVIDIA's is. Needs ``gpg`` to sign; the packages are written by Python.

    python -m peerlane.lab.nvidia_repository FOLDER [--layout debian13|ubuntu2404]

prints the fingerprint of the key that signs it, which lies in FOLDER as ``peerlane-lab.pub``.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path

KEY_FILE = "peerlane-lab.pub"
KEY_OWNER = "Peerlane lab (simulated repository) <lab@peerlane.invalid>"

# Driver versions that the simulated repository offers, the newest last.
DRIVERS = ("570.195.03", "580.95.05", "580.105.08", "595.58.03")
# The version of each toolkit's meta package, as NVIDIA numbers them.
# 12-7 is a trap: its meta package depends on a driver, as one by mistake could.
TOOLKITS = {"12-7": "12.7.0-1", "12-8": "12.8.1-1", "12-9": "12.9.1-1", "13-0": "13.0.2-1"}

TRAP = "12-7"
# Where packages lie that no list names: for faults.
FAULTS = "faults"

NVCC = """#!/bin/sh
# Simulated for the Peerlane lab: answers `nvcc --version`, compiles nothing.
echo "nvcc: simulated for the Peerlane lab"
echo "Cuda compilation tools, release {release}, V{release}.0"
"""
PERSISTENCED = """[Unit]
Description=NVIDIA Persistence Daemon (simulated for the Peerlane lab)
# There is no GPU in the lab, so the daemon of the lab never starts either.
ConditionPathExists=/dev/nvidiactl

[Service]
ExecStart=/usr/bin/sleep infinity

[Install]
WantedBy=multi-user.target
"""
CUDA_POSTINST = """#!/bin/sh
set -e
update-alternatives --install /usr/local/cuda cuda /usr/local/cuda-{release} {priority}
"""
CUDA_PRERM = """#!/bin/sh
set -e
[ "$1" = remove ] && update-alternatives --remove cuda /usr/local/cuda-{release} || true
"""


@dataclass(frozen=True)
class Deb:
    """One package: its control fields, its files (path -> text) and its maintainer scripts."""

    name: str
    version: str
    depends: str = ""
    architecture: str = "amd64"
    summary: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    scripts: Mapping[str, str] = field(default_factory=dict)
    conflicts: str = ""
    provides: str = ""

    @property
    def file_name(self) -> str:
        """Return the name of the ``.deb`` file."""
        return f"{self.name}_{self.version}_{self.architecture}.deb"

    def control(self) -> str:
        """Return the control file."""
        rows = [
            ("Package", self.name),
            ("Version", self.version),
            ("Architecture", self.architecture),
            ("Maintainer", KEY_OWNER),
            ("Depends", self.depends),
            ("Conflicts", self.conflicts),
            ("Provides", self.provides),
            ("Section", "misc"),
            ("Priority", "optional"),
            ("Description", f"{self.summary or self.name}, simulated for the Peerlane lab"),
        ]
        return "".join(f"{key}: {value}\n" for key, value in rows if value)


def write_deb(deb: Deb, folder: Path) -> Path:
    """Write a package. A ``.deb`` is an ar archive of three members (deb(5))."""
    control = {"control": (deb.control(), 0o644), **{name: (text, 0o755) for name, text in deb.scripts.items()}}
    data = {path: (text, 0o755 if "/bin/" in path else 0o644) for path, text in deb.files.items()}
    data[f"usr/share/doc/{deb.name}/README.simulated"] = (f"{deb.name} is simulated for the Peerlane lab.\n", 0o644)
    members = (
        ("debian-binary", b"2.0\n"),
        ("control.tar.gz", _tar(control)),
        ("data.tar.gz", _tar(data)),
    )
    target = folder / deb.file_name
    with target.open("wb") as stream:
        stream.write(b"!<arch>\n")
        for name, content in members:
            stream.write(f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode("ascii"))
            stream.write(content + (b"\n" if len(content) % 2 else b""))
    return target


def _tar(files: Mapping[str, tuple[str, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.GNU_FORMAT) as archive:
        for folder in sorted({str(parent) for path in files for parent in Path(path).parents if str(parent) != "."}):
            entry = tarfile.TarInfo(f"./{folder}")
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for path, (text, mode) in files.items():
            content = text.encode()
            entry = tarfile.TarInfo(f"./{path}")
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def debian_driver(version: str) -> Iterable[Deb]:
    """Return the driver's packages in the Debian layout: no branch in the names."""
    full = f"{version}-1"
    same = f"(= {full})"
    yield Deb("libnvidia-ml1", full, "libc6 (>= 2.28)", summary="NVIDIA management library")
    yield Deb(
        "libcuda1", full, f"libc6 (>= 2.28), libnvidia-ptxjitcompiler1 {same}", summary="NVIDIA CUDA driver library"
    )
    yield Deb("libnvidia-ptxjitcompiler1", full, "libc6 (>= 2.28)", summary="NVIDIA PTX compiler")
    yield Deb("firmware-nvidia-gsp", full, summary="NVIDIA GSP firmware")
    yield Deb("nvidia-kernel-support", full, summary="NVIDIA kernel module support files")
    yield Deb(
        "nvidia-driver-cuda",
        full,
        f"libcuda1 {same}, libnvidia-ml1 {same}, nvidia-kernel-support {same}",
        summary="NVIDIA driver, compute part",
    )
    for name, other in (
        ("nvidia-kernel-open-dkms", "nvidia-kernel-dkms"),
        ("nvidia-kernel-dkms", "nvidia-kernel-open-dkms"),
    ):
        yield Deb(
            name,
            full,
            f"nvidia-kernel-support {same}, firmware-nvidia-gsp {same}",
            summary="NVIDIA kernel module sources (none in it, so DKMS has nothing to build)",
            conflicts=other,
        )
    yield _persistenced("nvidia-persistenced", full, f"libnvidia-ml1 {same}")
    yield Deb(
        "nvidia-open", full, f"nvidia-driver-cuda {same}, nvidia-kernel-open-dkms {same}", summary="NVIDIA driver"
    )
    yield Deb("cuda-drivers", full, f"nvidia-driver-cuda {same}, nvidia-kernel-dkms {same}", summary="CUDA driver meta")


def ubuntu_driver(version: str) -> Iterable[Deb]:
    """Return the driver's packages in the Ubuntu layout: with the branch in the names up to 580."""
    branch = version.partition(".")[0]
    tail = f"-{branch}" if int(branch) < 590 else ""
    full = f"{version}-0ubuntu1" if tail else f"{version}-1ubuntu1"
    same = f"(= {full})"
    yield Deb(f"nvidia-kernel-common{tail}", full, summary="NVIDIA kernel support files")
    yield Deb(f"libnvidia-compute{tail}", full, "libc6 (>= 2.27)", summary="NVIDIA compute libraries")
    yield Deb(f"nvidia-utils{tail}", full, f"libnvidia-compute{tail} {same}", summary="NVIDIA utilities")
    yield _persistenced(f"nvidia-compute-utils{tail}", full, f"libnvidia-compute{tail} {same}")
    yield Deb(
        f"nvidia-dkms{tail}-open", full, f"nvidia-kernel-common{tail} {same}", summary="NVIDIA open kernel module"
    )
    yield Deb(f"nvidia-dkms{tail}", full, f"nvidia-kernel-common{tail} {same}", summary="NVIDIA kernel module")
    for name, kernel in (
        (f"nvidia-open{tail}", f"nvidia-dkms{tail}-open"),
        (f"cuda-drivers{tail}", f"nvidia-dkms{tail}"),
    ):
        yield Deb(name, full, f"{kernel} {same}, nvidia-utils{tail} {same}", summary="NVIDIA driver meta package")
    if tail:
        yield Deb("cuda-drivers", full, f"cuda-drivers{tail} {same}", summary="CUDA driver meta package")


def _persistenced(name: str, version: str, depends: str) -> Deb:
    unit = "usr/lib/systemd/system/nvidia-persistenced.service"
    return Deb(name, version, depends, summary="NVIDIA persistence daemon", files={unit: PERSISTENCED})


def toolkit(dashed: str, version: str) -> Iterable[Deb]:
    """Return one CUDA toolkit: the meta package without a driver, and NVIDIA's ``cuda-X-Y`` with one."""
    release = dashed.replace("-", ".")
    values = {"release": release, "priority": release.replace(".", "")}
    config = f"cuda-toolkit-{dashed}-config-common"
    yield Deb(
        config,
        version,
        architecture="all",
        summary="CUDA toolkit configuration",
        scripts={"postinst": CUDA_POSTINST.format(**values), "prerm": CUDA_PRERM.format(**values)},
    )
    yield Deb(
        f"cuda-nvcc-{dashed}",
        version,
        config,
        summary="CUDA compiler",
        files={f"usr/local/cuda-{release}/bin/nvcc": NVCC.format(**values)},
    )
    yield Deb(f"cuda-cudart-{dashed}", version, config, summary="CUDA runtime library")
    yield Deb(
        f"cuda-toolkit-{dashed}",
        version,
        f"cuda-nvcc-{dashed}, cuda-cudart-{dashed}, {config}" + (", cuda-drivers" if dashed == TRAP else ""),
        summary="CUDA toolkit",
        files={
            f"usr/local/cuda-{release}/version.json": f'{{"cuda": {{"name": "CUDA SDK", "version": "{version}"}}}}\n'
        },
    )
    yield Deb(f"cuda-{dashed}", version, f"cuda-toolkit-{dashed}, cuda-drivers", summary="CUDA with a driver")


def half_installed() -> Deb:
    """Return a driver of another repository whose configuration fails, so that dpkg leaves it half done."""
    return Deb(
        "nvidia-dkms-570",
        "570.133.20-0ubuntu1",
        summary="NVIDIA kernel module of another repository, whose configuration fails",
        scripts={"postinst": "#!/bin/sh\nexit 10\n"},
    )


def packages(layout: str) -> list[Deb]:
    """Return all packages of a layout (``debian13``, ``ubuntu2404`` and the like)."""
    driver = ubuntu_driver if layout.startswith("ubuntu") else debian_driver
    found = [deb for version in DRIVERS for deb in driver(version)]
    return found + [deb for dashed, version in TOOLKITS.items() for deb in toolkit(dashed, version)]


@dataclass(frozen=True)
class SigningKey:
    """An OpenPGP key made for one repository, in a key folder of its own."""

    home: Path
    fingerprint: str

    def sign(self, release: Path) -> None:
        """Write ``InRelease`` and ``Release.gpg`` beside the ``Release`` file."""
        _gpg(self.home, "--clearsign", "--output", str(release.with_name("InRelease")), str(release))
        _gpg(self.home, "--armor", "--detach-sign", "--output", f"{release}.gpg", str(release))

    def public(self) -> bytes:
        """Return the armored public key."""
        return _gpg(self.home, "--armor", "--export", self.fingerprint)


def make_key(home: Path) -> SigningKey:
    """Make a signing key without a passphrase in ``home``, or return the one that is there."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _gpg(home, "--list-secret-keys", "--with-colons"):
        _gpg(home, "--passphrase", "", "--quick-generate-key", KEY_OWNER, "ed25519", "sign", "never")
    rows = _gpg(home, "--list-secret-keys", "--with-colons").decode().splitlines()
    return SigningKey(home, next(row.split(":")[9] for row in rows if row.startswith("fpr:")))


def _gpg(home: Path, *arguments: str) -> bytes:
    # The agent is told to end with its parent: a lab leaves nothing running.
    command = ["gpg", "--homedir", str(home), "--batch", "--yes", "--quiet", "--pinentry-mode", "loopback", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"gpg {arguments[0]} ended with {done.returncode}: {done.stderr.decode().strip()}")
    return done.stdout


def build(folder: Path, layout: str = "debian13", extra: Iterable[Deb] = ()) -> str:
    """Build the repository and return the fingerprint of its key. An existing one keeps its key and is rebuilt."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.deb"):
        old.unlink()
    (folder / FAULTS).mkdir(exist_ok=True)
    write_deb(half_installed(), folder / FAULTS)
    stanzas = []
    for deb in [*packages(layout), *extra]:
        target = write_deb(deb, folder)
        content = target.read_bytes()
        stanzas.append(
            deb.control()
            + f"Filename: ./{target.name}\nSize: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}\n"
        )
    index = "\n".join(stanzas).encode()
    (folder / "Packages").write_bytes(index)
    (folder / "Packages.gz").write_bytes(gzip.compress(index, mtime=0))
    rows = [
        "Origin: NVIDIA",
        "Label: NVIDIA CUDA",
        "Architecture: x86_64",
        f"Date: {formatdate(time.time(), usegmt=True)}",
    ]
    rows.append("SHA256:")
    for name in ("Packages", "Packages.gz"):
        content = (folder / name).read_bytes()
        rows.append(f" {hashlib.sha256(content).hexdigest()} {len(content):>16} {name}")
    (folder / "Release").write_text("\n".join(rows) + "\n", encoding="utf-8")
    # The key folder lies beside the repository, not in it: what is served holds public files only. gpg's sockets need a
    # short path, so a link in the temporary folder stands for it.
    with tempfile.TemporaryDirectory(prefix="plg") as short:
        real = folder.parent / f"{folder.name}.key"
        real.mkdir(mode=0o700, exist_ok=True)
        home = Path(short) / "k"
        home.symlink_to(real)
        key = make_key(home)
        try:
            key.sign(folder / "Release")
            (folder / KEY_FILE).write_bytes(key.public())
        finally:
            subprocess.run(
                ["gpgconf", "--homedir", str(home), "--kill", "all"], check=False, capture_output=True, timeout=30
            )
    return key.fingerprint


def main() -> None:
    """Build a repository from the command line."""
    parser = argparse.ArgumentParser(prog="peerlane.lab.nvidia_repository", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layout", default="debian13", choices=("debian12", "debian13", "ubuntu2204", "ubuntu2404"))
    options = parser.parse_args()
    print(build(options.folder, options.layout))


if __name__ == "__main__":
    main()
