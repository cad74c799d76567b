"""After an installation: modules for each kernel, holds, the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import driver_builders as make
import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import driver_plan, driver_result

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "driver"
LOG = "/var/lib/dkms/nvidia-current-open/550.163.01/build/make.log"
KERNEL = "6.12.118+deb13-amd64"


def installed(state: str = "ii ", **changes: Any) -> dict[str, Any]:
    names = ("nvidia-open-kernel-dkms", "libcuda1", "libnvidia-ml1", "nvidia-smi", "nvidia-persistenced")
    rows = [(name, "550.163.01-2", make.DEBIAN, "550.163.01-2") for name in names]
    plain = {
        "packages": "".join(f"{state}\t{name}\t550.163.01-2\n" for name in names),
        "policy": make.policy(*rows),
        "repositories": make.repositories(make.DEBIAN),
        "kernels": [make.kernel(KERNEL)],
    }
    return make.facts(**{**plain, **changes})


def judge(facts: dict[str, Any]) -> driver_result.Result:
    made = driver_plan.plan(facts, {"enabled": "true", "source": "debian"}).as_dict()
    return driver_result.result(facts, made)


def test_a_module_for_each_kernel_is_success() -> None:
    found = judge(installed(dkms_status=f"nvidia-current-open/550.163.01, {KERNEL}, x86_64: installed\n"))

    assert (found.built, found.failures, found.installed) == ((KERNEL,), (), True)


def test_a_failed_build_is_told_with_the_compilers_line() -> None:
    found = judge(
        installed(
            dkms_status="nvidia-current-open/550.163.01: added\n",
            make_logs={LOG: (FIXTURES / "make.log").read_text(encoding="utf-8")},
        )
    )

    assert found.failures == (
        f"DKMS has no nvidia-current-open/550.163.01 for kernel {KERNEL} (state: added): nvidia/nv-pci.c:237:9: error: "
        f"too few arguments to function ‘pci_resize_resource’ [{LOG}]",
    )
    assert any("nvidia_driver_patches" in way for way in found.ways_out)
    assert any("nvidia_driver_source: nvidia" in way for way in found.ways_out)


def test_one_kernel_of_two_without_a_module_is_not_success() -> None:
    status = f"nvidia-current-open/550.163.01, {KERNEL}, x86_64: installed\n"
    found = judge(installed(dkms_status=status, kernels=[make.kernel(KERNEL), make.kernel("6.12.117+deb13-amd64")]))

    assert found.built == (KERNEL,)
    assert [one["kernel"] for one in found.missing] == ["6.12.117+deb13-amd64"]
    assert len(found.failures) == 1


def test_a_module_that_differs_from_its_build_is_not_success() -> None:
    status = (
        f"nvidia-current-open/550.163.01, {KERNEL}, x86_64: installed "
        "(WARNING! Diff between built and installed module!)\n"
    )

    assert judge(installed(dkms_status=status)).built == ()


def test_without_kernels_nothing_is_claimed() -> None:
    found = judge(installed(kernels=[], container="systemd-nspawn"))

    assert found.built == ()
    assert "no kernel is installed here, so no module was built" in found.unproven
    assert "a container loads no kernel modules" in found.unproven


def test_signed_modules_need_a_package_for_each_kernel() -> None:
    start = "linux-modules-nvidia-580-server-open-"
    packages = f"ii \tlibnvidia-compute-580-server\t580.95.05-0ubuntu1\nii \t{start}6.8.0-60-generic\t6.8.0-60.63+1\n"
    kernels = [make.kernel("6.8.0-60-generic"), make.kernel("6.8.0-61-generic")]
    facts = make.facts("noble", secure_boot=True, kernels=kernels, packages=packages)
    made = driver_plan.plan(facts, {"enabled": "true"}).as_dict()

    found = driver_result.result(facts, made)

    assert (found.version, found.built) == ("580.95.05", ("6.8.0-60-generic",))
    assert found.failures == (
        f"kernel 6.8.0-61-generic has no signed modules: {start}6.8.0-61-generic is not installed",
    )
    assert f"{start}6.8.0-60-generic" in found.unheld


def test_what_is_not_held_is_named() -> None:
    found = judge(installed(holds="libcuda1\n"))

    assert "nvidia-open-kernel-dkms" in found.unheld
    assert "libcuda1" not in found.unheld


@pytest.mark.parametrize(
    ("changes", "required"),
    [
        ({"loaded_version": "535.1.1", "gpus": [make.gpu(make.ADA, driver="nvidia")]}, True),
        ({"loaded_version": "550.163.01", "gpus": [make.gpu(make.ADA, driver="nvidia")]}, False),
        ({"gpus": [make.gpu(make.ADA, driver="nouveau")], "other_drivers": ["nouveau"]}, True),
        ({"gpus": [make.gpu(make.ADA)], "container": "lxc"}, False),
        ({}, False),
    ],
)
def test_a_reboot_is_needed_only_where_the_loaded_module_differs(changes: dict[str, Any], required: bool) -> None:
    assert judge(installed(**changes)).reboot_required is required


def test_a_first_installation_goes_back_to_nothing() -> None:
    after = installed("iF ")
    after["packages"] += "ii \tglx-alternative-nvidia\t1.2.2\nii \tlinux-headers-x\t1\nii \tdkms\t3\n"

    back = driver_result.rollback(make.facts(), after, ["nvidia-open-kernel-dkms=550.163.01-2", "linux-headers-x"])

    assert back["restore"] == []
    assert "nvidia-open-kernel-dkms" in back["purge"]
    assert "glx-alternative-nvidia" in back["purge"]
    assert not {"dkms", "linux-headers-x"} & set(back["purge"])


def test_a_failed_upgrade_goes_back_to_the_earlier_version() -> None:
    before = make.facts(packages="ii \tnvidia-driver-cuda\t570.1-1\nii \tlibcuda1\t570.1-1\n")
    after = make.facts(packages="iF \tnvidia-driver-cuda\t580.1-1\nii \tlibcuda1\t580.1-1\nii \tnvidia-x\t580.1-1\n")

    back = driver_result.rollback(before, after, [])

    assert back == {"purge": ["nvidia-x"], "restore": ["libcuda1=570.1-1", "nvidia-driver-cuda=570.1-1"]}


def test_what_two_runs_left_half_done_goes_away() -> None:
    half = make.facts(packages="iF \tnvidia-open-kernel-dkms\t550.163.01-2\nii \tlibcuda1\t550.163.01-2\n")

    assert driver_result.rollback(half, half, [])["purge"] == ["nvidia-open-kernel-dkms"]


def test_what_was_there_before_is_not_touched() -> None:
    same = make.facts(packages="ii \tnvidia-container-toolkit\t1.17-1\nii \tlibcuda1\t570.1-1\n")

    assert driver_result.rollback(same, same, []) == {"purge": [], "restore": []}
