"""Rules F: the NVIDIA driver."""

from __future__ import annotations

import pytest
import rule_builders as b


def host(role: str | None = "bare_metal", device: str = b.RTX_6000_ADA, **parts: object) -> object:
    parts.setdefault("pci", b.pci(*b.gpus_on_bus(2, device, driver="nvidia")))
    return b.snapshot(role, **parts)


def driver(**parts: object) -> dict[str, object]:
    return {"driver": b.Driver(**parts)}


def apt(started: str, command: str, *changes: tuple[str, str, str]) -> b.AptChange:
    return b.AptChange(started, command, changes)


UPGRADE = apt(
    "2031-05-06  06:12:44", "/usr/bin/unattended-upgrade", ("libnvidia-compute-580:amd64", "580.82.07", "580.95.05")
)
BY_HAND = apt("2031-05-09  11:00:00", "apt-get install nvtop", ("nvidia-settings:amd64", "1", "2"))
EMPTY_BUS = b.pci()


@pytest.mark.parametrize(
    ("rule", "judged", "state", "words"),
    [
        # F1
        ("F1", host(**driver(smi=b.smi(driver_version="580.95.05"))), "pass", "580.95.05"),
        ("F1", host(**driver(smi=b.smi("no_driver", rc=9))), "fail", "not loaded"),
        ("F1", host(**driver(smi=b.smi("no_devices", rc=6))), "fail", "no GPU"),
        ("F1", host(**driver(smi=b.smi("not_found"))), "fail", "no nvidia-smi"),
        ("F1", host(**driver(smi=b.smi("no_permission"))), "fail", "device nodes"),
        ("F1", host(**driver(smi=b.smi("error", message="strange\nlines"))), "fail", "strange"),
        ("F1", host(**driver(smi=b.smi("lost_gpu", lost=("0000:0B:00.0",)))), "fail", "0000:0B:00.0"),
        ("F1", host(**driver(smi=b.smi("unknown_error"))), "fail", "unknown error"),
        ("F1", host(**driver(smi=b.smi("version_mismatch"))), "info", "F3"),
        ("F1", host(pci=EMPTY_BUS, **driver(smi=b.smi("not_found"))), "not_applicable", "no NVIDIA GPU"),
        ("F1", host(**driver(smi=b.unknown("nvidia-smi timed out"))), "unknown", "timed out"),
        ("F1", b.snapshot(None), "unknown", "nvidia_smi"),
        # F2
        ("F2", host(device=b.SERVER_BLACKWELL, **driver(loaded_flavour=b.fact("proprietary"))), "fail", "open"),
        ("F2", host(device=b.SERVER_BLACKWELL, **driver(loaded_flavour=b.fact("open"))), "pass", "open"),
        ("F2", host(device="2bff", **driver(module_license=b.fact("NVIDIA"))), "fail", "Blackwell"),
        ("F2", host(device=b.GTX_1080_TI, **driver(loaded_flavour=b.fact("open"))), "fail", "proprietary"),
        ("F2", host(**driver(module_license=b.fact("Dual MIT/GPL"))), "pass", "open"),
        ("F2", host(**driver(module_license=b.fact("NVIDIA"))), "pass", "proprietary"),
        (
            "F2",
            host(
                kernel=b.Kernel(
                    log=b.log("NVRM: installed in this system requires use of the NVIDIA open kernel modules.")
                )
            ),
            "fail",
            "says",
        ),
        ("F2", host(device="ffff", **driver(loaded_flavour=b.fact("open"))), "unknown", "model"),
        ("F2", host(), "unknown", "proc.driver.nvidia.version"),
        ("F2", host(pci=EMPTY_BUS), "not_applicable", "no NVIDIA GPU"),
        # F3
        (
            "F3",
            host(**driver(loaded_version=b.fact("580.82.07"), library_version=b.fact("580.95.05"))),
            "fail",
            "module 580.82.07, library 580.95.05",
        ),
        ("F3", host(**driver(smi=b.smi("version_mismatch", library_version="580.95"))), "fail", "does not match"),
        (
            "F3",
            host(**driver(loaded_version=b.fact("580.82.07"), module_version=b.fact("580.95.05"))),
            "warn",
            "reboot",
        ),
        ("F3", host(**driver(loaded_version=b.fact("580.95.05"), library_version=b.fact("580.95.05"))), "pass", "both"),
        # A version that a message cut short is no other version.
        ("F3", host(**driver(loaded_version=b.fact("580.126.09"), library_version=b.fact("580.126"))), "pass", "both"),
        ("F3", host(**driver(loaded_version=b.fact("580.95.05"))), "unknown", "library's version"),
        ("F3", host(), "unknown", "loaded module's version"),
        # F4
        ("F4", host(device=b.RTX_5090, **driver(loaded_version=b.fact("550.163.01"))), "fail", "older than 570"),
        ("F4", host(device=b.RTX_5090, **driver(loaded_version=b.fact("570.86.15"))), "pass", "new enough"),
        ("F4", host("guest", **driver(loaded_version=b.fact("575.51.01"))), "info", "only by a clique"),
        ("F4", host("guest", **driver(loaded_version=b.fact("575.51.02"))), "pass", "new enough"),
        ("F4", host(), "unknown", "proc.driver.nvidia.version"),
        # F5
        (
            "F5",
            host(pci=b.pci(b.gpu_function(driver="nouveau", modules=("nouveau", "nvidia")))),
            "fail",
            "module is there",
        ),
        ("F5", host(pci=b.pci(b.gpu_function(driver="nova_core"))), "fail", "nova_core"),
        (
            "F5",
            host(kernel=b.Kernel(log=b.log("NVRM: GPU 0000:01:00.0 is already bound to NovaCore."))),
            "fail",
            "Another",
        ),
        ("F5", host(kernel=b.Kernel(modules=b.fact({"nouveau": 0, "nvidia": 3}))), "warn", "nouveau"),
        ("F5", host(), "pass", "No other driver"),
        ("F5", host(pci=b.pci(b.gpu_function(access_denied=True))), "unknown", "no driver"),
        ("F5", host(pci=EMPTY_BUS), "not_applicable", "no NVIDIA GPU"),
        # F6
        (
            "F6",
            host(kernel=b.Kernel(log=b.log("Loading of module with unavailable key is rejected"))),
            "fail",
            "not enrolled",
        ),
        (
            "F6",
            host(
                kernel=b.Kernel(log=b.log("modprobe: ERROR: could not insert 'nvidia': Key was rejected by service")),
                **driver(secure_boot=b.fact("enabled")),
            ),
            "fail",
            "rejects",
        ),
        ("F6", host(**driver(secure_boot=b.fact("enabled"), loaded_version=b.fact("580.95.05"))), "pass", "is loaded"),
        ("F6", host(**driver(secure_boot=b.fact("disabled"))), "pass", "disabled"),
        # This line alone means: loaded, and the kernel is tainted.
        (
            "F6",
            host(
                kernel=b.Kernel(
                    log=b.log(
                        "nvidia: module verification failed: signature and/or required key missing - tainting kernel"
                    )
                ),
                **driver(secure_boot=b.fact("disabled"), loaded_version=b.fact("580.95.05")),
            ),
            "pass",
            "disabled",
        ),
        ("F6", host(**driver(secure_boot=b.fact("enabled"))), "unknown", "not loaded"),
        ("F6", host(), "unknown", "mokutil.sb_state"),
    ],
)
def test_driver(rule: str, judged: object, state: str, words: str) -> None:
    found = b.findings(rule, judged)
    assert [one.state for one in found] == [state]
    assert words in f"{found[0].title} {found[0].reason}"
    assert state != "fail" or (found[0].fix is not None and found[0].fix.restart != "none")


def test_the_apt_transaction_that_brought_the_library_is_the_cause() -> None:
    judged = host(
        **driver(
            smi=b.smi("version_mismatch", message="Failed to initialize NVML: Driver/library version mismatch"),
            loaded_version=b.fact("580.82.07"),
            library_version=b.fact("580.95.05"),
            apt_history=b.fact((UPGRADE, BY_HAND), "log", "apt.history"),
        )
    )
    found = b.findings("F3", judged)[0]
    assert "unattended-upgrade changed libnvidia-compute-580 at 2031-05-06  06:12:44" in found.title
    assert any("580.82.07 -> 580.95.05" in one.excerpt for one in found.evidence)
    assert any(step.startswith("apt-mark hold") for step in found.fix.steps)
    assert not any("rmmod" in step or "modprobe -r" in step for step in found.fix.steps)
    assert found.explains == ()  # F1 only points to F3, so there is nothing to explain


def test_an_unknown_error_in_a_container_is_about_the_container() -> None:
    machine = b.Machine(container=b.fact("docker"))
    found = b.findings("F1", host(machine=machine, **driver(smi=b.smi("unknown_error"))))[0]
    assert "this container has lost its access" in found.title
    assert "no driver and library mismatch" in found.why


def test_hosts_of_one_fleet_with_different_drivers_are_named() -> None:
    old = host(host="old", **driver(loaded_version=b.fact("570.86.15")))
    new = host(host="new", **driver(loaded_version=b.fact("580.95.05")))
    assert "old has 570.86.15" in b.findings("F4", new, old)[0].title
    assert b.verdicts("F4", new, old) == ["warn"]
    assert b.verdicts("F4", new) == ["pass"]
