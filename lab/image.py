"""Base images: one Debian tree per release, built once with mmdebstrap, then only read."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .state import Paths, locked
from .system import DEBIAN_KEYRING, LabError, Progress, command, require_space

DISTROS: Mapping[str, str] = {"trixie": "Debian 13", "bookworm": "Debian 12"}
DEFAULT_DISTRO = "trixie"
PACKAGES = (
    "systemd",
    "systemd-sysv",
    "dbus",
    "openssh-server",
    "python3",
    "python3-apt",
    "sudo",
    "iproute2",
    "ca-certificates",
    "udev",
    "procps",
    "kmod",
    "pciutils",
    "libpam-systemd",
)
COMPONENTS = "main contrib non-free non-free-firmware"
RECIPE = 2  # raise it when the build or the configuration below changes
BUILD_MIB = 1500  # 240 MiB archive, 250 MiB tree, and mmdebstrap's own working copy with the package cache
BUILD_TIMEOUT_S = 900
DEFAULT_MIRROR = "http://deb.debian.org/debian"
DEFAULT_SECURITY = "http://deb.debian.org/debian-security"
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
LOCAL_CA = Path("/usr/local/share/ca-certificates")
PIP_FILES = (Path("/etc/pip.conf"), Path("/etc/xdg/pip/pip.conf"))
LOOPBACK = re.compile(r"(127\.\d+\.\d+\.\d+|localhost|\[?::1\]?)(?=[:/]|$)")
# Variables through which a machine says how it reaches the network.
VARIABLES = re.compile(
    r"^((http|https|ftp|no|all)_proxy|(HTTP|HTTPS|FTP|NO|ALL)_PROXY|PIP_.*|UV_(DEFAULT_INDEX|INDEX|INDEX_URL|NATIVE_TLS)"
    r"|\w*_CA_BUNDLE|SSL_CERT_(FILE|DIR))$"
)
APT_SETTINGS = re.compile(r'^Acquire::(?:(?:https?|ftp)::|Check-|Retries|ForceIPv|Max-FutureTime|Languages)[^ ]* "')


@dataclass(frozen=True)
class Machine:
    """How this machine reaches the outside; the hosts of the lab get the same."""

    mirror: str
    security: str
    apt_settings: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    pip_files: tuple[tuple[str, str], ...]

    @property
    def fingerprint(self) -> str:
        """Eight hex digits that change when a tree made with other settings would differ."""
        bundle = CA_BUNDLE.read_bytes() if CA_BUNDLE.exists() else b""
        return hashlib.sha256(repr(self).encode() + bundle + str(RECIPE).encode()).hexdigest()[:8]


def this_machine() -> Machine:
    """Read the machine's own package sources, apt settings, pip files and network variables."""
    sources = [
        file.read_text(encoding="utf-8", errors="replace")
        for pattern in ("sources.list", "sources.list.d/*.list", "sources.list.d/*.sources")
        for file in sorted(Path("/etc/apt").glob(pattern))
    ]
    mirror, security = debian_mirrors(sources)
    dump = command(["apt-config", "dump"], check=False).stdout.splitlines()
    return Machine(
        mirror=mirror,
        security=security,
        apt_settings=tuple(line for line in dump if APT_SETTINGS.match(line) and not LOOPBACK.search(line)),
        environment=usable_variables(os.environ, lambda path: path.startswith("/etc/ssl/")),
        pip_files=tuple(
            (str(file), text)
            for file in PIP_FILES
            if file.exists() and (text := usable_pip_settings(file.read_text(encoding="utf-8"))) is not None
        ),
    )


def debian_mirrors(sources: Iterable[str]) -> tuple[str, str]:
    """Return the URIs of Debian and of its security suite in apt source texts (both formats), or the public ones."""
    mirror, security = "", ""
    for uri, suite in _source_entries("\n\n".join(sources)):
        release, _, part = suite.partition("-")
        if release not in (*DISTROS, "stable", "oldstable", "testing", "sid"):
            continue
        if part == "security":
            security = security or uri
        elif not part:
            mirror = mirror or uri
    return mirror.rstrip("/") or DEFAULT_MIRROR, security.rstrip("/") or DEFAULT_SECURITY


def _source_entries(text: str) -> Iterable[tuple[str, str]]:
    """Give (URI, suite) of one-line and deb822 entries."""
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        for line in stanza.splitlines():
            if match := re.match(r"\s*deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)\s", line + " "):
                yield match[1], match[2]
            elif match := re.match(r"(URIs|Suites|Types|Enabled):\s*(.*)", line):
                fields[match[1]] = match[2]
        if fields.get("Enabled", "yes") != "no" and "deb" in fields.get("Types", "").split():
            for uri in fields.get("URIs", "").split():
                for suite in fields.get("Suites", "").split():
                    yield uri, suite


def usable_variables(environment: Mapping[str, str], in_image: Callable[[str], bool]) -> tuple[tuple[str, str], ...]:
    """Return the network variables that also mean something inside a host.

    Left out: proxies on the machine's own loopback, and paths of which `in_image(path)` says that a host lacks them.
    """
    kept = []
    for name, value in sorted(environment.items()):
        if not VARIABLES.match(name) or not value or "\n" in value or '"' in value:
            continue
        if LOOPBACK.search(value) and not name.lower().startswith("no_"):
            continue
        if any(not in_image(word.removeprefix("file://")) for word in value.split() if _is_path(word)):
            continue
        kept.append((name, value))
    return tuple(kept)


def usable_pip_settings(text: str) -> str | None:
    """Return a pip configuration text, or None where it points to paths that a host does not have."""
    words = re.split(r"[\s=]+", text)
    foreign = [word for word in words if _is_path(word) and not word.startswith("/etc/ssl/")]
    return None if foreign or LOOPBACK.search(text) else text


def _is_path(word: str) -> bool:
    return word.startswith(("/", "file:/"))


def sources_text(distro: str, machine: Machine) -> str:
    """Return the deb822 sources of a host: the release with its updates and security suites, all components."""
    return "\n".join(
        f"Types: deb\nURIs: {uri}\nSuites: {suites}\nComponents: {COMPONENTS}\n"
        f"Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
        for uri, suites in (
            (machine.mirror, f"{distro} {distro}-updates"),
            (machine.security, f"{distro}-security"),
        )
    )


def ensure(paths: Paths, distro: str, progress: Progress) -> Path:
    """Return the tree of a release, building what is missing of archive and tree. A tree is complete or not there."""
    machine = this_machine()
    packages = hashlib.sha256(repr((PACKAGES, COMPONENTS)).encode()).hexdigest()[:8]
    archive = paths.images / f"{distro}-{packages}.tar"
    tree = paths.images / f"{distro}-{packages}-{machine.fingerprint}"

    def build(work: Path) -> Path:
        if not archive.exists():
            require_space(paths.images, BUILD_MIB, f"building the {DISTROS[distro]} image")
            _bootstrap(distro, machine, work, archive, progress)
        progress(f"{distro}: unpacking the image")
        (work / "tree").mkdir()
        command(["tar", "-xf", archive, "-C", work / "tree", "--numeric-owner"], timeout_s=120)
        _configure(work / "tree", distro, machine)
        return work / "tree"

    return built_once(tree, distro, build)


def built_once(place: Path, kind: str, build: Callable[[Path], Path]) -> Path:
    """Return a folder that is complete or not there: ``build`` makes it in a folder beside and returns it.

    One builds a ``kind`` at a time; what an interrupted build left goes.
    """
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with locked(place.parent / f".{kind}.lock"):
        if place.is_dir():
            return place
        for leftover in place.parent.glob(f".building-{kind}-*"):
            shutil.rmtree(leftover)
        work = place.parent / f".building-{kind}-{os.getpid()}"
        work.mkdir()
        try:
            build(work).rename(place)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return place


def _bootstrap(distro: str, machine: Machine, work: Path, archive: Path, progress: Progress) -> None:
    progress(f"{distro}: building the {DISTROS[distro]} image, once (1-3 minutes, about 120 MB to download)")
    options = [f"--aptopt={setting}" for setting in machine.apt_settings]
    if platform.freedesktop_os_release().get("ID") != "debian":
        options.append(f"--keyring={DEBIAN_KEYRING}")  # apt's own trusted keys are another distribution's
    log = archive.with_suffix(".log")
    done = command(
        [
            "mmdebstrap",
            "--variant=minbase",
            "--mode=root",
            f"--components={COMPONENTS}",
            f"--include={','.join(PACKAGES)}",
            *options,
            distro,
            work / "rootfs.tar",
            machine.mirror,
        ],
        timeout_s=BUILD_TIMEOUT_S,
        check=False,
        env={"TMPDIR": str(work)},
    )
    log.write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("E:")]
        raise LabError(
            f"building the {distro} image from {machine.mirror} failed: {(errors or ['no error line'])[0]};"
            f" the whole output is in {log}"
        )
    (work / "rootfs.tar").rename(archive)
    log.unlink()


def _configure(tree: Path, distro: str, machine: Machine) -> None:
    """Give a fresh tree what all hosts share: sources, certificates, network variables, units, the user `admin`."""
    apt = tree / "etc/apt"
    (apt / "sources.list").unlink(missing_ok=True)
    (apt / "sources.list.d/debian.sources").write_text(sources_text(distro, machine), encoding="utf-8")
    (apt / "apt.conf.d/99mmdebstrap").unlink(missing_ok=True)
    (apt / "apt.conf.d/90lab-machine").write_text("".join(f"{line}\n" for line in machine.apt_settings))
    if LOCAL_CA.is_dir():
        shutil.copytree(LOCAL_CA, tree / LOCAL_CA.relative_to("/"), dirs_exist_ok=True)
        command(["chroot", tree, "update-ca-certificates"], timeout_s=120)
    if CA_BUNDLE.exists():
        shutil.copyfile(CA_BUNDLE, tree / CA_BUNDLE.relative_to("/"))
    for file, text in machine.pip_files:
        target = tree / file.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    variables = "".join(f'{name}="{value}"\n' for name, value in machine.environment)
    (tree / "etc/environment").write_text(variables, encoding="utf-8")
    (tree / "etc/default/locale").write_text("LANG=C.UTF-8\n", encoding="utf-8")
    (tree / "etc/machine-id").write_text("", encoding="utf-8")
    (tree / "etc/motd").write_text("Peerlane lab host: disposable, and without a GPU.\n", encoding="utf-8")
    for key in (tree / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    (tree / "etc/sudoers.d/admin").write_text("admin ALL=(ALL) NOPASSWD: ALL\n", encoding="utf-8")
    (tree / "etc/sudoers.d/admin").chmod(0o440)
    command(["chroot", tree, "useradd", "--create-home", "--shell", "/bin/bash", "admin"])
    command(["chroot", tree, "systemctl", "enable", "systemd-networkd", "ssh"])
    command(["chroot", tree, "systemctl", "disable", "systemd-networkd-wait-online"])
    # Package timers would take the apt lock whenever they like.
    command(["chroot", tree, "systemctl", "mask", "console-getty", "apt-daily.timer", "apt-daily-upgrade.timer"])
    # The image has no package lists; their folder's age is what "update the cache if it is old" goes by.
    os.utime(tree / "var/lib/apt/lists", (0, 0))
    if (tree / "usr/lib/systemd/system/sshd-keygen.service").exists():
        command(["chroot", tree, "systemctl", "mask", "sshd-keygen.service"])
