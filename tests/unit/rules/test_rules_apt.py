"""Rules F2, F3 and H4 by the output of apt: mixed repositories, another release, a change of flavour, no headers."""

from __future__ import annotations

import pytest
import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import AptOutput, Unmet


def host(**output: object) -> object:
    return b.snapshot("bare_metal", driver=b.Driver(apt=b.fact((AptOutput(**output),), "apt says", "apt.output")))


def unmet(wants: str, condition: str, instead: str, package: str = "nvidia-driver-590") -> dict[str, object]:
    return {"unmet": (Unmet(package, wants, condition, instead),)}


MIXED = unmet("nvidia-kernel-common-590", ">= 590.48.01", "590.44.01-0ubuntu1")
RELEASE = unmet("libc6", ">= 2.38", "2.36-9+deb12u10", "libnvidia-compute-590")
FLIP = {"removed": ("nvidia-dkms-590-open",), "new": ("nvidia-dkms-590", "libgtk2.0-0t64", "pkgconf")}
NO_HEADERS = b.snapshot(
    "hypervisor",
    driver=b.Driver(
        dkms=b.fact((b.DkmsState("nvidia", "590.44.01", "6.5.1-1-pve", "headers_missing"),), "log", "dkms.log"),
        apt=b.fact((AptOutput(not_found=("proxmox-headers-6.5.1-1-pve",)),), "E: Unable to locate", "apt.output"),
    ),
)


@pytest.mark.parametrize(
    ("rule", "judged", "state", "words"),
    [
        ("F3", host(**MIXED), "fail", "nvidia-kernel-common-590 (>= 590.48.01) is wanted"),
        ("F3", host(**RELEASE), "fail", "libc6 2.38 or newer (as in Ubuntu 23.10), and 2.36-9+deb12u10 is installed"),
        ("F2", host(**FLIP), "warn", "it would install nvidia-dkms-590 in the same run"),
        ("H4", NO_HEADERS, "fail", "in no configured repository"),
    ],
)
def test_apt(rule: str, judged: object, state: str, words: str) -> None:
    found = [one for one in b.findings(rule, judged) if one.state == state]
    assert len(found) == 1
    assert words in found[0].title
    assert any(one.source == "apt.output" for one in found[0].evidence)


@pytest.mark.parametrize(
    "output",
    [
        {"removed": ("nvidia-dkms-590-open",), "new": ("nvidia-dkms-595-open",)},
        {"removed": ("nvidia-dkms-590-open",)},
        {"new": ("nvidia-dkms-590", "nvidia-driver-590")},
        unmet("libgtk2.0-0", ">= 2.24", "2.20"),
        unmet("nvidia-kernel-common-590", ">= 590.48.01", "it is not installable"),
    ],
)
def test_other_plans_of_apt_are_no_finding_about_the_driver(output: dict[str, object]) -> None:
    judged = host(**output)
    assert not any(one.bad for rule in ("F2", "F3") for one in b.findings(rule, judged))


def test_desktop_packages_that_come_along_are_told() -> None:
    told = [one for one in b.findings("F2", host(**FLIP)) if one.state == "info"]
    assert len(told) == 1
    assert "libgtk2.0-0t64" in told[0].title


def test_a_kernel_without_headers_in_any_repository_is_left_first() -> None:
    fix = b.findings("H4", NO_HEADERS)[0].fix
    assert fix.steps[0].startswith("reboot")
    assert not any("linux-headers" in step for step in fix.steps)
