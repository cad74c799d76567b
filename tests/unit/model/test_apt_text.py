"""apt's and DKMS's output, recorded and in the shapes of odd hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import apt_text
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import dkms

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "driver"


def recorded(name: str) -> str:
    return (FIXTURES / name).read_text(encoding="utf-8")


def test_recorded_repositories_have_their_release_fields() -> None:
    found = apt_text.repositories(recorded("apt_cache_policy.txt"))

    assert len(found) == 8
    contrib = next(one for one in found if "trixie/contrib" in one.place)
    assert (contrib.vendor, contrib.codename, contrib.priority) == ("debian", "trixie", 500)
    assert contrib.url == "http://deb.debian.org/debian"


def test_recorded_versions_know_whose_they_are() -> None:
    known = apt_text.repositories(recorded("apt_cache_policy.txt"))
    found = apt_text.versions(recorded("apt_cache_policy_packages.txt"), known)

    assert found["nvidia-open-kernel-dkms"].candidate == "550.163.01-2"
    assert found["nvidia-open-kernel-dkms"].table["550.163.01-2"][0].vendor == "debian"
    headers = found["linux-headers-amd64"]
    assert headers.installed == "6.12.118-1"
    assert list(headers.table) == ["6.12.118-1", "6.12.117-1"]


def test_a_flat_repository_is_joined_with_its_release_line() -> None:
    known = apt_text.repositories(
        " 500 file:/srv/repo  Packages\n     release o=NVIDIA,l=NVIDIA CUDA,c=\n     origin \n"
    )
    table = (
        "a:\n  Installed: (none)\n  Candidate: 1\n  Version table:\n     1 1001\n        500 file:/srv/repo  Packages\n"
    )

    assert apt_text.versions(table, known)["a"].table["1"][0].vendor == "nvidia"


def test_a_recorded_simulation_names_what_would_come() -> None:
    found = apt_text.simulation(recorded("apt_get_simulate.txt"))

    assert found.install["nvidia-open-kernel-dkms"] == "550.163.01-2"
    assert found.install["nvidia-modprobe"] == "570.133.07-1"
    assert (found.remove, found.problems) == ({}, ())


def test_a_removal_that_installs_another_flavour_is_seen() -> None:
    text = (
        "Remv nvidia-driver-570-open [570.1-0ubuntu1]\n"
        "Inst nvidia-dkms-570 (570.1-0ubuntu1 Ubuntu:24.04/noble-updates [amd64])\n"
        "Purg nvidia-dkms-570-open [570.1-0ubuntu1]\n"
        "Inst libc6 [2.39-1] (2.39-2 Ubuntu:24.04/noble [amd64])\n"
    )

    found = apt_text.simulation(text)

    assert dict(found.install) == {"nvidia-dkms-570": "570.1-0ubuntu1", "libc6": "2.39-2"}
    assert set(found.remove) == {"nvidia-driver-570-open", "nvidia-dkms-570-open"}


def test_unmet_dependencies_become_one_line_each() -> None:
    text = (
        "The following packages have unmet dependencies:\n"
        " libnvidia-compute-600 : Depends: libc6 (>= 2.40) but 2.36-9 is to be installed\n"
        "                         Depends: libssl4 (>= 4.0) but it is not installable\n"
        " nvidia-utils-600 : Depends: libc6 (>= 2.38)\n"
        "                    Recommends: nvidia-settings but it is not going to be installed\n"
        "E: Unable to correct problems, you have held broken packages.\n"
    )

    assert apt_text.simulation(text).problems == (
        "libnvidia-compute-600 needs libc6 (>= 2.40): 2.36-9 is what this host has",
        "libnvidia-compute-600 needs libssl4 (>= 4.0): nothing here provides it",
        "nvidia-utils-600 needs libc6 (>= 2.38)",
    )


def test_a_package_that_is_not_there_is_a_problem() -> None:
    assert apt_text.simulation("E: Unable to locate package nvidia-x\n").problems == (
        "Unable to locate package nvidia-x",
    )


@pytest.mark.parametrize(
    ("name", "driver"),
    [
        ("cuda-drivers", True),
        ("cuda-drivers-580", True),
        ("nvidia-open-580", True),
        ("libnvidia-compute-580", True),
        ("libcuda1", True),
        ("linux-modules-nvidia-580-server-open-generic", True),
        ("nvidia-driver-pinning-580", True),
        ("cuda-toolkit-12-8", False),
        ("cuda-driver-dev-12-8", False),
        ("libcublas-12-8", False),
        ("nvidia-container-toolkit", False),
        ("libnvidia-container1", False),
        ("nvidia-fs-dkms", False),
        ("nsight-compute-2025.1.1", False),
    ],
)
def test_driver_packages_are_told_from_others(name: str, driver: bool) -> None:
    assert apt_text.is_driver_package(name) is driver


@pytest.mark.parametrize(
    ("version", "driver"),
    [
        ("580.95.05-1", "580.95.05"),
        ("1:580.95.05-1~bpo13+1", "580.95.05"),
        ("530.41.03-0ubuntu0.22.04.2", "530.41.03"),
        ("595.58.03-1ubuntu1", "595.58.03"),
    ],
)
def test_the_driver_version_is_inside_the_package_version(version: str, driver: str) -> None:
    assert apt_text.upstream(version) == driver


def test_dpkg_states_tell_what_is_half_done() -> None:
    found = apt_text.installed("ii \ta\t1\nhi \tb\t1\niF \tc\t1\nrc \td\t1\nun \te\t\niHR\tf\t1\niU \tg\t1\n")

    assert set(found) == {"a", "b", "c", "f", "g"}
    assert [name for name, one in found.items() if one.broken] == ["c", "f", "g"]
    assert [name for name, one in found.items() if one.complete] == ["a", "b"]


def test_dkms_status_of_old_and_new_versions() -> None:
    text = (
        "nvidia/580.95.05, 6.8.0-60-generic, x86_64: installed (Original modules exist)\n"
        "nvidia, 570.1, 5.15.0-91-generic, x86_64: built\n"
        "nvidia-current-open/550.163.01: added\n"
        "Deprecated feature: REMAKE_INITRD\n"
    )

    assert [(one.module, one.version, one.kernel, one.state, one.note) for one in dkms.status(text)] == [
        ("nvidia", "580.95.05", "6.8.0-60-generic", "installed", "Original modules exist"),
        ("nvidia", "570.1", "5.15.0-91-generic", "built", ""),
        ("nvidia-current-open", "550.163.01", "", "added", ""),
    ]


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            "  gcc -Werror -c x.c\n/var/lib/dkms/m/1/build/a/b.c:3:1: fatal error: x.h: No such file\n",
            "a/b.c:3:1: fatal error: x.h: No such file",
        ),
        (
            "ld: final link failed: No space left on device\nmake: *** [Makefile:1: all] Error 2\n",
            "ld: final link failed: No space left on device",
        ),
        ('ERROR: modpost: "foo" [x.ko] undefined!\nmake: *** [y] Error 1\n', 'ERROR: modpost: "foo" [x.ko] undefined!'),
        ("/bin/sh: 1: gcc-13: command not found\n", "/bin/sh: 1: gcc-13: command not found"),
        ("make: *** [Makefile:115: modules] Error 2\n", "make: *** [Makefile:115: modules] Error 2"),
        ("all went well -Werror\n", ""),
        ("", ""),
    ],
)
def test_the_cause_line_of_a_build_log(log: str, cause: str) -> None:
    assert dkms.cause(log) == cause


def test_the_recorded_failure_names_its_module_and_kernel() -> None:
    (found,) = dkms.failures(recorded("apt_get_install_failed.txt"))

    assert (found.module, found.version) == ("nvidia-current-open", "550.163.01")
    assert (found.kernel, found.state) == ("6.12.118+deb13-amd64", "failed")


def test_indented_installer_output_and_missing_headers_are_understood() -> None:
    text = (
        "         Error! Bad return status for module build on kernel: 5.15.9-1-pve (x86_64)\n"
        "         Consult /var/lib/dkms/nvidia/470.1/build/make.log for more information.\n"
        "Error! Your kernel headers for kernel 6.5.1-1-pve cannot be found.\n"
    )

    assert {(one.kernel, one.state, one.version) for one in dkms.failures(text)} == {
        ("6.5.1-1-pve", "headers_missing", ""),
        ("5.15.9-1-pve", "failed", "470.1"),
    }
