"""The fabric manager, units, device nodes, module parameters, clocks and apt, from their outputs to facts."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.evidence import Evidence
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import FabricReport
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import dkms, fabric, packages

MISMATCH = (
    "nv-fabricmanager[7]: fabric manager NVIDIA GPU driver interface version 590.1.2 don't match with driver version"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{MISMATCH} 590.1.1. Please update", [("590.1.2", "590.1.1", "", False)]),
        (f"{MISMATCH} 590.1.1. Please".replace("'", "\u2019"), [("590.1.2", "590.1.1", "", False)]),
        (MISMATCH.partition(" don't")[0] + " don'", [("590.1.2", "", "", False)]),
        (
            f"{MISMATCH} 590.1.\nnvidia-fabricmanager.service: Control process exited, code=exited, status=1/FAILURE",
            [("590.1.2", "590.1", "exited 1", False)],
        ),
        ("     Active: active (running) since Mon", [("", "", "active", False)]),
        ("     Active: failed (Result: exit-code)\nNV_WARN_NOTHING_TO_DO", [("", "", "failed", True)]),
        ("Unit nvidia-fabricmanager.service could not be found.", [("", "", "not-found", False)]),
        ("Fabric Manager version is : 590.44.01", [("590.44.01", "", "", False)]),
        ("something else", []),
    ],
)
def test_the_fabric_manager(text, expected):
    reports = fabric.reports(text, "s")

    assert [(one.version, one.driver_version, one.state, one.nothing_to_do) for one in reports] == expected
    assert all(one.source == "s" for one in reports)


UNITS = (
    "Id=nvidia-persistenced.service\nLoadState=loaded\nActiveState=active\nUnitFileState=enabled\n\n"
    "Id=nvidia-fabricmanager.service\nLoadState=not-found\nActiveState=inactive\n"
)


def test_units_become_facts(built):
    made = built({"systemctl.nvidia_units": UNITS})

    assert made.driver.persistence_daemon.value == "active"
    assert made.driver.fabric_manager.value == (FabricReport(state="not-found", source="systemctl.nvidia_units"),)
    assert built({}).driver.fabric_manager.reason == "systemctl.fabricmanager was not collected"


def test_a_missing_unit_that_systemctl_only_complains_of_is_read(built):
    entry = Evidence("systemctl.fabricmanager", rc=4, stderr="Unit nvidia-fabricmanager.service could not be found.\n")

    assert built({"systemctl.fabricmanager": entry}).driver.fabric_manager.value[0].state == "not-found"


def test_small_files_become_facts(built):
    made = built(
        {
            "nvidia_devices": "/dev/nvidia-uvm\n/dev/nvidia0\n/dev/nvidiactl\n",
            "nvidia_uvm.parameters": "# ==> /sys/module/nvidia_uvm/parameters/uvm_disable_hmm <==\nN\n",
            "proc.driver.nvidia.power": "# ==> /proc/driver/nvidia/gpus/0000:01:00.0/power <==\n"
            "Runtime D3 status:          Disabled by default\nVideo Memory:               Active\n",
            "clocksource": "# ==> /sys/devices/system/clocksource/clocksource0/available_clocksource <==\ntsc hpet\n"
            "# ==> /sys/devices/system/clocksource/clocksource0/current_clocksource <==\nhpet\n",
            "systemctl.version": "systemd 257 (257.9-1)\n+PAM +AUDIT\n",
            "engine.log": "RuntimeError: CUDA error 802: system not yet initialized\n",
        }
    )

    assert made.driver.device_nodes.value == ("nvidia-uvm", "nvidia0", "nvidiactl")
    assert made.driver.uvm_hmm_disabled.value is False
    assert made.driver.runtime_d3.value == {"0000:01:00.0": "Disabled by default"}
    assert (made.kernel.clocksource.value, made.kernel.clocksources.value) == ("hpet", ("tsc", "hpet"))
    assert made.machine.systemd.value == "257"
    assert "802" in (made.driver.not_ready.value or "")


def test_what_nvidia_smi_tells_of_all_gpus_together(built):
    made = built(
        {
            "nvidia_smi.q": "Attached GPUs    : 4\nGPU 00000000:01:00.0\n    Product Name    : NVIDIA A30\n"
            "    Processes        : None\n",
            "nvidia_smi.nvlink_s": Evidence("nvidia_smi.nvlink_s", rc=0),
            "nvidia_smi.dmon": "# gpu    pwr     sm\n    0     40      3\n",
        }
    )

    assert (made.driver.attached_gpus.value, len(made.gpus.value or ())) == (4, 1)
    assert made.driver.processes.value == ()
    assert made.driver.nvlinks.value == ()
    assert [one.power_w for one in made.driver.samples.value or ()] == [40.0]


def test_a_lost_gpu_keeps_its_reason(built):
    said = "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.  Reboot the system to recover\n"
    smi = built({"nvidia_smi": said}).driver.smi.value

    assert (smi.lost, smi.lost_reasons) == (("0000:02:00.0",), ("GPU is lost",))


REFUSED = """The following packages have unmet dependencies:
 nvidia-driver-590 : Depends: nvidia-kernel-common-590 (>= 590.48.01) but 590.44.01-0ubuntu1 is to be installed
                     Recommends: libnvidia-gl-590:i386 (= 590.48.01)
E: Unable to locate package proxmox-headers-6.5.1-1-pve
"""


def test_apt_becomes_a_fact_with_its_lines(built):
    made = built({"apt.output": Evidence("apt.output", stdout=REFUSED, command="apt upgrade")})
    (output,) = made.driver.apt.value

    assert (output.command, output.not_found) == ("apt upgrade", ("proxmox-headers-6.5.1-1-pve",))
    assert [(one.package, one.wants, one.condition, one.instead) for one in output.unmet] == [
        ("nvidia-driver-590", "nvidia-kernel-common-590", ">= 590.48.01", "590.44.01-0ubuntu1")
    ]
    assert "Depends: nvidia-kernel-common-590" in made.driver.apt.excerpt
    assert "Recommends" not in made.driver.apt.excerpt
    assert not built({"apt.output": "Reading package lists... Done\n"}).driver.apt.known


def test_a_purge_names_what_it_brings():
    output = packages.apt_output(
        "The following additional packages will be installed:\n  nvidia-dkms-590 pkgconf\n"
        "The following packages will be REMOVED:\n  nvidia-dkms-590-open* nvidia-driver-590-open*\n"
        "The following NEW packages will be installed:\n  nvidia-dkms-5"
    )

    assert output.removed == ("nvidia-dkms-590-open", "nvidia-driver-590-open")
    assert output.additional == ("nvidia-dkms-590", "pkgconf")


def test_a_failed_build_names_its_status_and_its_log():
    (state,) = dkms.failures(
        "Error! Bad return status for module build on kernel: 6.8.1-1-pve (x86_64)\n"
        "'make' -j8 modules....(bad exit status: 2)\n"
        "Consult /var/lib/dkms/nvidia/590.44.01/build/make.log for more information.\n"
    )

    assert (state.exit_status, state.log) == (2, "/var/lib/dkms/nvidia/590.44.01/build/make.log")
