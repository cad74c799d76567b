"""The simulated NVIDIA repository is one that apt accepts, until somebody touches it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ansible_collections.peerlane.gpu.plugins.module_utils import openpgp
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import driver_plan
from peerlane.lab import nvidia_repository
from peerlane.lab.nvidia_repository import KEY_FILE, Deb

needs_gpg = pytest.mark.skipif(shutil.which("gpg") is None, reason="gpg signs the repository")
needs_apt = pytest.mark.skipif(shutil.which("apt-get") is None, reason="apt-get is what has to accept or refuse it")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvidia") / "repository"
    nvidia_repository.build(folder)
    return folder


@pytest.fixture
def copy(repository: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(repository, tmp_path / "copy"))


def apt_update(folder: Path, key: bytes, root: Path) -> subprocess.CompletedProcess[str]:
    """Run ``apt-get update`` in an apt of its own that knows this repository only."""
    for name in ("lists/partial", "cache/archives/partial", "etc/preferences.d", "etc/apt.conf.d", "etc/trusted.gpg.d"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "status").touch()
    (root / "key.gpg").write_bytes(openpgp.binary(key))
    (root / "etc/lab.sources").write_text(
        f"Types: deb\nURIs: file:{folder}/\nSuites: /\nSigned-By: {root}/key.gpg\n", encoding="utf-8"
    )
    config = root / "apt.conf"
    config.write_text(
        f'Dir "{root}/"; Dir::Etc "{root}/etc/"; Dir::Etc::sourcelist "{root}/etc/lab.sources";'
        'Dir::Etc::sourceparts "-";'
        f'Dir::State "{root}/"; Dir::State::status "{root}/status"; Dir::Cache "{root}/cache/"; Dir::Bin::Methods '
        '"/usr/lib/apt/methods"; APT::Sandbox::User ""; APT::Architecture "amd64"; APT::Architectures {"amd64";};'
        'Dir::Bin::dpkg "/usr/bin/dpkg";\n',
        encoding="utf-8",
    )
    return subprocess.run(
        ["apt-get", "-q", "update"],
        env={"APT_CONFIG": str(config), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@needs_gpg
@needs_apt
def test_apt_accepts_the_signed_repository(repository: Path, tmp_path: Path) -> None:
    done = apt_update(repository, (repository / KEY_FILE).read_bytes(), tmp_path)

    assert done.returncode == 0, done.stderr


@needs_gpg
@needs_apt
def test_apt_refuses_a_release_file_that_was_touched(copy: Path, tmp_path: Path) -> None:
    signed = copy / "InRelease"
    signed.write_text(
        signed.read_text(encoding="utf-8").replace("Label: NVIDIA CUDA", "Label: nvidia cuda"), encoding="utf-8"
    )

    done = apt_update(copy, (copy / KEY_FILE).read_bytes(), tmp_path / "apt")

    assert done.returncode != 0
    assert "invalid" in done.stderr or "BADSIG" in done.stderr


@needs_gpg
@needs_apt
def test_apt_refuses_a_package_list_that_was_touched(copy: Path, tmp_path: Path) -> None:
    (copy / "Packages.gz").unlink()
    listed = copy / "Packages"
    listed.write_text(listed.read_text(encoding="utf-8").replace("580.95.05", "580.95.06"), encoding="utf-8")

    done = apt_update(copy, (copy / KEY_FILE).read_bytes(), tmp_path / "apt")

    assert done.returncode != 0


@needs_gpg
@needs_apt
def test_apt_refuses_the_key_of_somebody_else(repository: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    nvidia_repository.build(other)

    done = apt_update(repository, (other / KEY_FILE).read_bytes(), tmp_path / "apt")

    assert done.returncode != 0


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb has to read the packages")
def test_dpkg_reads_a_package_that_python_wrote(tmp_path: Path) -> None:
    deb = Deb("x", "1-1", files={"usr/bin/x": "#!/bin/sh\n"}, scripts={"postinst": "#!/bin/sh\n"})

    path = nvidia_repository.write_deb(deb, tmp_path)

    fields = subprocess.run(["dpkg-deb", "-f", str(path)], capture_output=True, text=True, check=True, timeout=30)
    assert "Description: x, simulated for the Peerlane lab" in fields.stdout
    files = subprocess.run(["dpkg-deb", "-c", str(path)], capture_output=True, text=True, check=True, timeout=30)
    assert "-rwxr-xr-x" in next(line for line in files.stdout.splitlines() if line.endswith("./usr/bin/x"))


@pytest.mark.parametrize("layout", ["debian13", "ubuntu2404"])
def test_every_package_says_that_it_is_simulated(layout: str) -> None:
    for deb in nvidia_repository.packages(layout):
        assert "simulated for the Peerlane lab" in deb.control()


@pytest.mark.parametrize(("layout", "system"), [("debian13", "trixie"), ("ubuntu2404", "noble")])
@pytest.mark.parametrize("branch", ["570", "580", "595"])
@pytest.mark.parametrize("flavour", ["open", "proprietary"])
def test_the_layout_has_what_the_role_installs(layout: str, system: str, branch: str, flavour: str) -> None:
    release = {"trixie": 'ID=debian\nVERSION_ID="13"', "noble": 'ID=ubuntu\nVERSION_ID="24.04"'}[system]
    empty = ("packages", "holds", "repositories", "policy", "dkms_status", "container", "secure_boot_reason")
    facts = {
        **dict.fromkeys((*empty, "loaded_version"), ""),
        **{key: [] for key in ("gpus", "kernels", "keys", "other_drivers", "asked")},
        "os_release": release,
        "architecture": "amd64",
        "secure_boot": False,
        "runfile": False,
        "lists_present": True,
    }
    wishes = {"enabled": "true", "source": "nvidia", "branch": branch, "flavour": flavour}

    wanted = driver_plan.plan(facts, wishes).packages

    assert set(wanted) <= {deb.name for deb in nvidia_repository.packages(layout)}
