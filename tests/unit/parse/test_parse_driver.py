"""Driver files, DKMS, packages, Secure Boot, machine identity, NCCL settings."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import DkmsState, Setting
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import dkms, driver, machine, nccl, nccl_log, packages
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse.text import RefusedError


@pytest.mark.parametrize(
    ("text", "version", "flavour"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (a@b)",
            "580.95.05",
            "open",
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.105.08  Wed Oct 29", "580.105.08", "proprietary"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release", "580.95.05", "open"),
    ],
)
def test_the_loaded_module_names_its_version_and_flavour(text, version, flavour):
    loaded = driver.loaded(f"{text}\nGCC version:  gcc version 13.3.0 (x)\n")

    assert (loaded.version, loaded.flavour, loaded.line) == (version, flavour, text)


def test_other_text_is_no_loaded_module():
    with pytest.raises(RefusedError):
        driver.loaded("GCC version: 13\n")


def test_params_gpus_module_and_library():
    assert driver.params('EnableGpuFirmware: 18\nRegistryDwords: "ForceP2P=17;x=1"\nGrdma: ""\n') == {
        "EnableGpuFirmware": "18",
        "RegistryDwords": "ForceP2P=17;x=1",
        "Grdma": "",
    }
    assert driver.proc_gpus("# ==> /proc/driver/nvidia/gpus/0000:c1:00.0/information <==\nModel: \t X\n") == (
        "0000:c1:00.0",
    )
    assert driver.proc_gpus("Model: X\nBus Location: \t 0000:01:00.0\n") == ("0000:01:00.0",)
    info = driver.modinfo(
        "filename: /lib/modules/x/nvidia.ko.zst\nlicense:        Dual MIT/GPL\nversion:        580.95.05\n"
    )
    assert (info.version, info.license) == ("580.95.05", "Dual MIT/GPL")
    paths = (
        "/usr/lib/x86_64-linux-gnu/libcuda.so.1\n/usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06\n"
        "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05\n"
    )
    assert driver.library_version(paths) == ("580.95.05", "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05")
    assert driver.library_version("/usr/lib/libcuda.so.1\n") is None


def test_modinfo_without_a_module_is_refused_in_its_words():
    with pytest.raises(RefusedError, match="Module nvidia not found"):
        driver.modinfo("modinfo: ERROR: Module nvidia not found.\n")


@pytest.mark.parametrize(
    ("row", "state"),
    [
        (
            "nvidia/595.58.03, 6.17.13-2-pve, x86_64: installed",
            DkmsState("nvidia", "595.58.03", "6.17.13-2-pve", "installed"),
        ),
        (
            "nvidia/595.58.03, 6.8.0-1, x86_64: installed (WARNING! Diff between built and installed module!)",
            DkmsState(
                "nvidia", "595.58.03", "6.8.0-1", "installed", "WARNING! Diff between built and installed module!"
            ),
        ),
        ("nvidia-current/550.163.01: added", DkmsState("nvidia-current", "550.163.01", "", "added")),
        ("nvidia, 470.86, 5.4.0-1-amd64, x86_64: built", DkmsState("nvidia", "470.86", "5.4.0-1-amd64", "built")),
        ("nvidia/550.1: broken", DkmsState("nvidia", "550.1", "", "broken")),
    ],
)
def test_dkms_status_of_any_age(row, state):
    assert dkms.status(f"{row}\nError! something\n") == (state,)


def test_missing_headers_name_the_kernel():
    (state,) = dkms.failures("Error! Your kernel headers for kernel 6.8.1-1-pve cannot be found.\nPlease install\n")

    assert (state.kernel, state.state) == ("6.8.1-1-pve", "headers_missing")


def test_an_installers_failure_is_read_through_its_indentation():
    text = (
        "  ERROR: Failed to run `/usr/sbin/dkms build -m nvidia -v 470.1 -k 6.8.1-1-pve`:\n"
        "         'make' -j20 modules....(bad exit status: 2)\n"
        "         Error! Bad return status for module build on kernel: 6.8.1-1-pve (x86_64)\n"
        "         Consult /var/lib/dkms/nvidia/470.1/build/make.log for more information.\n"
    )

    (state,) = dkms.failures(text)

    assert (state.module, state.version, state.kernel, state.state) == ("nvidia", "470.1", "6.8.1-1-pve", "failed")


def test_a_make_log_names_the_compilers_first_error():
    text = (
        "DKMS make.log for nvidia-current-550.1.2 for kernel 6.12.9+deb13-amd64 (x86_64)\n"
        "make[1]: Entering directory '/usr/src'\n"
        "nv-drm.c:12:3: error: implicit declaration of function 'drm_old'\n"
        "nv-drm.c:99:3: error: another\n"
        "make[2]: *** [Makefile:1: x] Error 1\n"
    )

    (state,) = dkms.failures(text)

    assert (state.module, state.version, state.kernel) == ("nvidia-current", "550.1.2", "6.12.9+deb13-amd64")
    assert state.note == "nv-drm.c:12:3: error: implicit declaration of function 'drm_old'"


def test_a_log_without_a_failure_has_none():
    assert dkms.failures("Building module: done.\nDKMS: install completed.\n") == ()


def test_packages_held_by_state_or_by_list():
    found = packages.dpkg(
        "ii \tnvidia-driver\t550.1-1\nhi \tlibcuda1\t550.1-1\niF \tnvidia-dkms\t550.1-1\nrc \told\t1\n"
        "ii  nvidia-smi:amd64   550.1-1  amd64  tool\n",
        held=("nvidia-driver",),
    )

    assert {name: (one.state, one.held) for name, one in found.items()} == {
        "nvidia-driver": ("ii", True),
        "libcuda1": ("hi", True),
        "nvidia-dkms": ("iF", False),
        "old": ("rc", False),
        "nvidia-smi": ("ii", False),
    }
    assert packages.holds("nvidia-driver\nlibcuda1:amd64\n") == ("nvidia-driver", "libcuda1")


def test_apt_history_keeps_what_touched_nvidia():
    text = (
        "\nStart-Date: 2026-01-01  06:00:00\nCommandline: apt install vim\nInstall: vim:amd64 (9.0)\nEnd-Date: x\n"
        "\nStart-Date: 2026-01-02  06:50:54\nCommandline: /usr/bin/unattended-upgrade\n"
        "Upgrade: libnvidia-compute:amd64 (1.0-1, 1.1-1), bash:amd64 (5.1, 5.2)\nRemove: nvidia-old:amd64 (0.9)\n"
        "Install: nvidia-new:amd64 (2.0, automatic)\nEnd-Date: x\n"
    )

    (change,) = packages.apt_history(text)

    assert (change.started, change.command) == ("2026-01-02 06:50:54", "/usr/bin/unattended-upgrade")
    assert change.changes == (
        ("libnvidia-compute:amd64", "1.0-1", "1.1-1"),
        ("nvidia-old:amd64", "0.9", ""),
        ("nvidia-new:amd64", "", "2.0"),
    )


def test_apt_says_what_it_cannot_and_what_it_would():
    read = packages.apt_output(
        "The following additional packages will be installed:\n  nvidia-dkms-570 libx1\n"
        "The following packages will be REMOVED:\n  nvidia-dkms-570-open*\n"
        "The following NEW packages will be installed:\n  nvidia-dkms-570\n"
        " nvidia-a : Depends: libc6 (>= 2.38) but 2.31-13 is to be installed\n"
        "            Depends: libssl3 (>= 3.0) but it is not installable\n"
        "E: Unable to locate package pve-headers-6\n"
    )

    assert (read.additional, read.removed, read.new) == (
        ("nvidia-dkms-570", "libx1"),
        ("nvidia-dkms-570-open",),
        ("nvidia-dkms-570",),
    )
    assert [(one.package, one.wants, one.condition, one.instead) for one in read.unmet] == [
        ("nvidia-a", "libc6", ">= 2.38", "2.31-13"),
        ("nvidia-a", "libssl3", ">= 3.0", "it is not installable"),
    ]
    assert read.not_found == ("pve-headers-6",)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("SecureBoot enabled\n", "enabled"),
        ("SecureBoot disabled\nPlatform is in Setup Mode\n", "disabled"),
        ("This system doesn't support Secure Boot\n", "unsupported"),
        ("EFI variables are not supported on this system\n", "unsupported"),
        ("something else\n", None),
    ],
)
def test_secure_boot_in_mokutils_words(text, state):
    found = packages.secure_boot(text)

    assert (found[0] if found else None) == state


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("efi: yes\nsecure_boot: 1\n", "enabled"),
        ("efi: yes\nsecure_boot: 0\n", "disabled"),
        ("efi: no\n", "unsupported"),
        ("efi: yes\n", None),
    ],
)
def test_secure_boot_of_the_firmware(text, state):
    found = packages.secure_boot_of_firmware(text)

    assert (found[0] if found else None) == state


def test_the_processor_of_cpuinfo_and_lscpu():
    cpuinfo = (
        "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: X\n"
        "flags\t\t: fpu hypervisor\naddress sizes\t: 46 bits physical, 48 bits virtual\n"
    )

    one = machine.processor(f"{cpuinfo}processors\t: 64\n")
    cut = machine.processor(cpuinfo)
    listed = machine.processor(
        "Architecture: x86_64\nAddress sizes: 52 bits physical, 57 bits virtual\nCPU(s): 8\nVendor ID: GenuineIntel\n"
    )

    assert (one.vendor, one.physical_bits, one.virtual_bits, one.threads) == ("AuthenticAMD", 46, 48, 64)
    assert one.flags == frozenset({"fpu", "hypervisor"})
    assert cut.threads is None
    assert (listed.vendor, listed.physical_bits, listed.threads, listed.flags) == ("GenuineIntel", 52, 8, None)


@pytest.mark.parametrize(
    ("text", "word"), [("kvm\n", "kvm"), ("none\n", "none"), ("KVM", "kvm"), ("docker", None), ("bash: x", None)]
)
def test_only_known_words_are_a_virtual_machine(text, word):
    assert machine.virtualisation(text, machine.VIRTUAL_MACHINES) == word


def test_nccl_conf_is_read_as_literally_as_nccl_does():
    settings = nccl.conf(
        "# text = x\nNCCL_ALGO = Ring\n  NCCL_PROTO=LL\nNCCL_P2P_LEVEL=PHB # why\nFOO=1\n\n", "/etc/nccl.conf"
    )

    assert [(one.name, one.value) for one in settings] == [
        ("NCCL_ALGO ", " Ring"),
        ("  NCCL_PROTO", "LL"),
        ("NCCL_P2P_LEVEL", "PHB # why"),
        ("FOO", "1"),
    ]


def test_settings_of_units_carry_the_unit():
    text = "# ==> unit peerlane-model@a.service <==\nActiveState=active\nEnvironment NCCL_P2P_DISABLE=1\n"

    assert nccl.services(text) == (Setting("NCCL_P2P_DISABLE", "1", "unit peerlane-model@a.service"),)
    assert nccl.services('[Service]\nEnvironment="NCCL_DEBUG=INFO" PATH=/bin\n') == (
        Setting("NCCL_DEBUG", "INFO", "unit file"),
    )


def test_an_nccl_log_tells_its_version_and_what_it_took():
    text = (
        "h:1:1 [0] NCCL INFO NCCL version 2.27.3+cuda12.9\n"
        "h:1:1 [0] NCCL INFO NCCL_P2P_LEVEL set by environment to PHB\n"
    )

    assert nccl.log_version(text) == "2.27.3+cuda12.9"
    assert nccl_log.parse(text).settings == (("NCCL_P2P_LEVEL", "PHB"),)
