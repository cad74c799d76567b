"""The driver's plan: what is chosen, and what stops it before anything is installed."""

from __future__ import annotations

from typing import Any

import driver_builders as make
import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.gpu_generation import generation
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import driver_plan


def plan(facts: dict[str, Any], **options: Any) -> driver_plan.Plan:
    return driver_plan.plan(facts, {"enabled": "true", **options})


@pytest.mark.parametrize(
    ("device", "name", "modules"),
    [
        ("13c2", "Maxwell", "proprietary"),
        ("17c8", "Maxwell", "proprietary"),
        ("15f8", "Pascal", "proprietary"),
        ("1b06", "Pascal", "proprietary"),
        ("1db4", "Volta", "proprietary"),
        ("1eb8", "Turing", "either"),
        ("2184", "Turing", "either"),
        ("20b2", "Ampere", "either"),
        ("2204", "Ampere", "either"),
        ("2330", "Hopper", "either"),
        ("2342", "Grace Hopper", "open"),
        ("2684", "Ada", "either"),
        ("26b9", "Ada", "either"),
        ("2901", "Blackwell", "open"),
        ("2b85", "Blackwell", "open"),
        ("2bb5", "Blackwell", "open"),
        ("3182", "Blackwell Ultra", "open"),
        ("1004", "older than Maxwell", "none"),
        ("3f00", "newer than this table", "open"),
    ],
)
def test_a_device_id_tells_the_generation_and_its_modules(device: str, name: str, modules: str) -> None:
    found = generation(int(device, 16))

    assert (found.name, found.modules) == (name, modules)


def test_without_a_gpu_nothing_happens_by_itself() -> None:
    made = driver_plan.plan(make.facts(), {"enabled": "auto"})

    assert (made.enabled, made.reason) == (False, "no NVIDIA GPU on the PCI bus")


def test_false_wins_over_a_gpu() -> None:
    assert not driver_plan.plan(make.facts(gpus=[make.gpu(make.ADA)]), {"enabled": "False"}).enabled


@pytest.mark.parametrize(
    ("device", "options", "flavour", "branch"),
    [
        (make.BLACKWELL, {}, "open", 580),
        (make.ADA, {}, "open", 580),
        (make.ADA, {"flavour": "proprietary"}, "proprietary", 580),
        (make.PASCAL, {}, "proprietary", 580),
        ("3182", {}, "open", 580),
        (make.ADA, {"branch": "570", "toolkit_versions": ["12.8"]}, "open", 570),
        (make.ADA, {"toolkit_versions": ["12.8", "13.0"]}, "open", 580),
        (make.ADA, {"version": "595.58.03"}, "open", 595),
    ],
)
def test_flavour_and_branch_follow_gpu_and_toolkit(
    device: str, options: dict[str, Any], flavour: str, branch: int
) -> None:
    made = plan(make.facts(gpus=[make.gpu(device)]), **options)

    assert (made.flavour, made.branch, made.stops) == (flavour, branch, ())


@pytest.mark.parametrize(
    ("toolkit", "branch"), [("12.8", 570), ("12.9", 575), ("12.1", 525), ("13.0", 580), ("13.2", 580), ("13.0.2", 580)]
)
def test_a_toolkit_has_a_lowest_branch(toolkit: str, branch: int) -> None:
    assert driver_plan.toolkit_branch(toolkit) == branch


@pytest.mark.parametrize(
    ("system", "options", "packages"),
    [
        ("trixie", {}, ("nvidia-kernel-open-dkms", "nvidia-driver-cuda", "nvidia-persistenced")),
        (
            "trixie",
            {"source": "debian", "flavour": "proprietary"},
            ("nvidia-kernel-dkms", "libcuda1", "libnvidia-ml1", "nvidia-smi", "nvidia-persistenced"),
        ),
        (
            "noble",
            {},
            (
                "nvidia-dkms-580-server-open",
                "libnvidia-compute-580-server",
                "nvidia-utils-580-server",
                "nvidia-compute-utils-580-server",
            ),
        ),
        (
            "noble",
            {"source": "nvidia"},
            ("nvidia-dkms-580-open", "libnvidia-compute-580", "nvidia-utils-580", "nvidia-compute-utils-580"),
        ),
        (
            "noble",
            {"source": "nvidia", "branch": "595"},
            ("nvidia-dkms-open", "libnvidia-compute", "nvidia-utils", "nvidia-compute-utils"),
        ),
    ],
)
def test_each_source_has_its_package_names(system: str, options: dict[str, Any], packages: tuple[str, ...]) -> None:
    assert plan(make.facts(system), **options).packages == packages


def test_signed_modules_are_named_for_each_kernel() -> None:
    facts = make.facts("noble", secure_boot=True, kernels=[make.kernel("6.8.0-60-generic", headers=False)])

    made = plan(facts)

    assert made.modules == "signed"
    assert made.packages[0] == "linux-modules-nvidia-580-server-open-6.8.0-60-generic"
    assert made.stops == ()


def signed_offers(**changes: Any) -> dict[str, Any]:
    """Return Ubuntu with Secure Boot, its driver and the signed modules of one kernel."""
    users = ("libnvidia-compute-580-server", "nvidia-utils-580-server", "nvidia-compute-utils-580-server")
    rows = [(name, "580.95.05-0ubuntu0.24.04.2", make.UBUNTU, "") for name in users]
    modules = "linux-modules-nvidia-580-server-open-6.8.0-60-generic"
    plain = {
        "secure_boot": True,
        "kernels": [make.kernel("6.8.0-60-generic", headers=False)],
        "repositories": make.repositories(make.UBUNTU),
        "policy": make.policy(*rows, (modules, "6.8.0-60.63+1", make.UBUNTU, "")),
        "asked": [*users, modules],
    }
    return make.facts("noble", **{**plain, **changes})


def test_signed_modules_are_numbered_by_their_kernel_and_the_libraries_by_the_driver() -> None:
    made = plan(signed_offers())

    assert (made.version, made.stops) == ("580.95.05", ())
    assert made.install[0] == "linux-modules-nvidia-580-server-open-6.8.0-60-generic"
    assert made.install[1] == "libnvidia-compute-580-server=580.95.05-0ubuntu0.24.04.2"


def test_a_kernel_that_has_no_signed_modules_stops() -> None:
    kernels = [make.kernel("6.8.0-60-generic"), make.kernel("6.8.0-99-custom")]
    name = "linux-modules-nvidia-580-server-open-6.8.0-99-custom"

    stops = plan(signed_offers(kernels=kernels, asked=[name])).stops

    assert stops == (f"ubuntu has no signed modules {name}; set nvidia_driver_modules to dkms, or boot another kernel",)


STOPS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (
        "a distribution that is not supported",
        {"system": 'ID=debian\nVERSION_ID="11"\n'},
        {},
        "debian 11 is not supported",
    ),
    ("a 32-bit system", {"architecture": "i386"}, {}, "architecture i386"),
    (
        "Ubuntu's packages on Debian",
        {},
        {"source": "ubuntu"},
        "nvidia_driver_source is ubuntu, but this host runs debian",
    ),
    ("a GPU that nothing drives", {"gpus": [make.gpu("1004")]}, {}, "no supported driver branch"),
    (
        "GPUs that need different flavours",
        {"gpus": [make.gpu(make.BLACKWELL), make.gpu(make.PASCAL, "0000:02:00.0")]},
        {},
        "one host can load one flavour",
    ),
    (
        "proprietary modules for Blackwell",
        {"gpus": [make.gpu(make.BLACKWELL)]},
        {"flavour": "proprietary"},
        "works with the open kernel modules only",
    ),
    (
        "open modules for Pascal",
        {"gpus": [make.gpu(make.PASCAL)]},
        {"flavour": "open"},
        "proprietary kernel modules only",
    ),
    ("a branch after the last for Pascal", {"gpus": [make.gpu(make.PASCAL)]}, {"branch": "595"}, "580 is the last one"),
    ("a branch too old for Blackwell", {"gpus": [make.gpu(make.BLACKWELL)]}, {"branch": "550"}, "needs at least 570"),
    ("Debian's branch for Blackwell", {"gpus": [make.gpu(make.BLACKWELL)]}, {"source": "debian"}, "source: nvidia"),
    (
        "a branch too old for the toolkit",
        {},
        {"branch": "570", "toolkit_versions": ["13.0"]},
        "CUDA toolkit 13.0 needs",
    ),
    ("proprietary modules of a branch without", {}, {"flavour": "proprietary", "branch": "620"}, "gone since 620"),
    (
        "a kernel whose headers nobody offers",
        {"kernels": [make.kernel("6.1.0-9-amd64", headers=False)]},
        {},
        "kernel 6.1.0-9-amd64 has no headers, and no repository offers linux-headers-6.1.0-9-amd64",
    ),
    (
        "a Proxmox kernel whose headers nobody offers",
        {"kernels": [make.kernel("6.17.2-1-pve", headers=False, running=True)]},
        {},
        "6.17.2-1-pve (running) has no headers, and no repository offers proxmox-headers-6.17.2-1-pve or pve-headers",
    ),
    ("a driver of the .run installer", {"runfile": True}, {}, "run nvidia-uninstall first"),
    (
        "Secure Boot with a key that is not enrolled",
        {"secure_boot": True, "keys": [{"path": "/var/lib/dkms/mok.pub", "enrolled": False, "reason": ""}]},
        {},
        "/var/lib/dkms/mok.pub is not enrolled",
    ),
    ("Secure Boot without a key", {"secure_boot": True}, {}, "there is no key yet that DKMS could sign with"),
    (
        "Secure Boot with a key list that cannot be read",
        {"secure_boot": True, "keys": [{"path": "/k", "enrolled": None, "reason": "Permission denied"}]},
        {},
        "cannot be read whether /k is enrolled (Permission denied)",
    ),
    (
        "signed modules where there are none",
        {"secure_boot": True},
        {"modules": "signed"},
        "only Ubuntu's archive has signed modules",
    ),
    (
        "a half-configured driver of somebody else",
        {"packages": "iF \tnvidia-dkms-570\t570.1-0ubuntu1\n"},
        {},
        "dpkg stopped half way with nvidia-dkms-570 570.1-0ubuntu1 (iF)",
    ),
]


@pytest.mark.parametrize(("changes", "options", "line"), [row[1:] for row in STOPS], ids=[row[0] for row in STOPS])
def test_what_could_not_work_stops_in_one_line(changes: dict[str, Any], options: dict[str, Any], line: str) -> None:
    changes = dict(changes)
    made = plan(make.facts(changes.pop("system", "trixie"), **changes), **options)

    assert [stop for stop in made.stops if line in stop], made.stops
    assert all("\n" not in stop for stop in made.stops)
    assert made.install == ()


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"kernels": [make.kernel("6.1.0-9-amd64", headers=False)]}, {"ignored_kernels": ["6.1.0-9-amd64"]}),
        ({"secure_boot": True, "keys": [{"path": "/k", "enrolled": True, "reason": ""}]}, {}),
        ({"secure_boot": None, "secure_boot_reason": "no efivarfs"}, {}),
        ({"secure_boot": True, "container": "systemd-nspawn"}, {}),
        ({"packages": "rc \tnvidia-dkms-470\t470.1-1\n"}, {}),
        ({"packages": "ii \tnvidia-container-toolkit\t1.17-1\n"}, {}),
    ],
)
def test_what_can_work_does_not_stop(changes: dict[str, Any], options: dict[str, Any]) -> None:
    assert plan(make.facts(**changes), **options).stops == ()


def test_missing_headers_that_are_offered_are_installed_first() -> None:
    offered = make.nvidia_offers("580.95.05-1")
    offered["policy"] += make.policy(("linux-headers-6.12.118+deb13-amd64", "6.12.118-1", make.DEBIAN, ""))
    kernels = [make.kernel("6.12.117+deb13-amd64"), make.kernel("6.12.118+deb13-amd64", headers=False)]

    made = plan(make.facts(kernels=kernels, **offered))

    assert made.headers == ("linux-headers-6.12.118+deb13-amd64",)
    assert made.install[:2] == ("linux-headers-6.12.118+deb13-amd64", "nvidia-kernel-open-dkms=580.95.05-1")


def test_without_package_lists_headers_are_unknown_and_not_missing() -> None:
    made = plan(make.facts(lists_present=False, kernels=[make.kernel("6.1.0-9-amd64", headers=False)]))

    assert made.stops == ()
    assert any("is not known, apt has no package lists yet" in note for note in made.notes)


def test_the_newest_version_of_the_branch_is_pinned_for_all_packages() -> None:
    made = plan(make.facts(**make.nvidia_offers("595.58.03-1", "580.105.08-1", "580.95.05-1")))

    assert made.version == "580.105.08"
    assert set(made.install) == {f"{name}=580.105.08-1" for name in made.packages}


def test_an_installed_version_stays_when_a_newer_one_appears() -> None:
    made = plan(make.facts(**make.nvidia_offers("580.105.08-1", "580.95.05-1", installed="580.95.05-1")))

    assert made.version == "580.95.05"
    assert any("580.105.08-1 is available" in note for note in made.notes)


def test_another_flavour_keeps_the_version() -> None:
    offered = make.nvidia_offers("580.105.08-1", "580.95.05-1", installed="580.95.05-1")
    offered["packages"] = offered["packages"].replace("ii \tnvidia-kernel-dkms\t580.95.05-1\n", "")

    made = plan(make.facts(**offered), flavour="proprietary")

    assert made.install[0] == "nvidia-kernel-dkms=580.95.05-1"


def test_libraries_that_hang_on_the_old_version_move_with_the_module() -> None:
    offered = make.nvidia_offers("580.105.08-1", "580.95.05-1", installed="580.95.05-1")
    rows = [("libcuda1", version, make.NVIDIA, "580.95.05-1") for version in ("580.105.08-1", "580.95.05-1")]
    offered["policy"] += make.policy(*rows)
    offered["packages"] += "hi \tlibcuda1\t580.95.05-1\n"

    assert "libcuda1=580.105.08-1" in plan(make.facts(**offered), version="580.105.08").install
    assert "libcuda1" not in " ".join(plan(make.facts(**offered)).install)


def test_an_exact_version_is_taken_by_its_upstream_number() -> None:
    made = plan(make.facts(**make.nvidia_offers("580.105.08-1", "580.95.05-1")), version="580.95.05")

    assert made.version == "580.95.05"


def test_a_version_that_nobody_offers_stops_with_what_there_is() -> None:
    made = plan(make.facts(**make.nvidia_offers("570.195.03-1")))

    assert "nvidia offers nvidia-kernel-open-dkms 570.195.03-1, not branch 580" in made.stops[0]


def test_libraries_that_lack_the_modules_version_stop() -> None:
    offered = make.nvidia_offers("580.95.05-1")
    offered["policy"] = offered["policy"].replace(
        "nvidia-driver-cuda:\n  Installed: (none)\n  Candidate: 580.95.05-1\n  Version table:\n     580.95.05-1",
        "nvidia-driver-cuda:\n  Installed: (none)\n  Candidate: 580.105.08-1\n  Version table:\n     580.105.08-1",
    )

    asked = plan(make.facts(**offered, asked=["nvidia-driver-cuda"])).stops
    not_asked = plan(make.facts(**offered)).stops

    assert "nvidia-driver-cuda 580.95.05 is not offered by nvidia, only 580.105.08-1" in asked[0]
    assert not_asked == ()


def test_before_the_repository_is_there_the_version_is_unknown() -> None:
    made = plan(make.facts())

    assert (made.version, made.install, made.stops) == ("", (), ())
    assert any("exact version not known yet" in note for note in made.notes)


def test_mixed_repositories_are_named_with_both_versions() -> None:
    rows = [
        ("nvidia-kernel-common-530", "530.41.03-0ubuntu0.24.04.2", make.UBUNTU, "530.41.03-0ubuntu0.24.04.2"),
        ("nvidia-dkms-530", "530.30.02-0ubuntu1", make.NVIDIA, "530.30.02-0ubuntu1"),
        ("libnvidia-compute-530", "530.41.03-0ubuntu0.24.04.2", make.UBUNTU, "530.41.03-0ubuntu0.24.04.2"),
    ]
    packages = "".join(f"ii \t{name}\t{version}\n" for name, version, _, _ in rows)
    facts = make.facts(
        "noble",
        packages=packages,
        policy=make.policy(*rows),
        repositories=make.repositories(make.NVIDIA, make.UBUNTU),
    )

    line = next(stop for stop in plan(facts).stops if "mixed" in stop)

    assert "nvidia: nvidia-dkms-530 530.30.02-0ubuntu1" in line
    assert "ubuntu: libnvidia-compute-530 530.41.03-0ubuntu0.24.04.2" in line


def test_a_whole_driver_of_another_origin_stops() -> None:
    rows = [("nvidia-open-kernel-dkms", "550.163.01-2", make.DEBIAN, "550.163.01-2")]
    facts = make.facts(
        packages="ii \tnvidia-open-kernel-dkms\t550.163.01-2\n",
        policy=make.policy(*rows),
        repositories=make.repositories(make.DEBIAN),
    )

    assert "comes from debian, but nvidia_driver_source is nvidia" in plan(facts).stops[0]
    assert not [stop for stop in plan(facts, source="debian").stops if "comes from" in stop]


def test_what_an_earlier_run_left_half_done_is_finished() -> None:
    offered = make.nvidia_offers("580.95.05-1", installed="580.95.05-1")
    offered["packages"] = offered["packages"].replace("ii \tnvidia-kernel-open-dkms", "iF \tnvidia-kernel-open-dkms")

    made = plan(make.facts(**offered))

    assert (made.repair, made.stops) == (True, ())


@pytest.mark.parametrize(
    ("place", "release", "line"),
    [
        (
            "https://m.example/compute/cuda/repos/ubuntu2404/x86_64  Packages",
            "o=NVIDIA",
            "is for ubuntu2404, this host",
        ),
        ("http://u.example/ubuntu noble/main amd64 Packages", "o=Ubuntu,n=noble", "another C library"),
        (
            "http://d.example/debian forky/main amd64 Packages",
            "o=Debian,n=forky",
            "is Debian forky, this host is debian",
        ),
    ],
)
def test_a_source_of_another_release_stops(place: str, release: str, line: str) -> None:
    text = f" 500 {place}\n     release {release}\n     origin x\n"

    assert line in plan(make.facts(repositories=text)).stops[0]
    assert plan(make.facts(repositories=text.replace(" 500 ", " 100 ", 1))).stops == ()


def test_the_repository_and_its_key_follow_the_distribution() -> None:
    debian = plan(make.facts()).repository
    ubuntu = plan(make.facts("jammy", architecture="arm64"), source="nvidia").repository

    assert debian["key_url"].endswith("/repos/debian13/x86_64/8793F200.pub")
    assert debian["fingerprint"].endswith("8793F200")
    assert ubuntu["url"].endswith("/repos/ubuntu2204/sbsa")
    assert ubuntu["fingerprint"].endswith("3BF863CC")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"branch": "latest"}, "nvidia_driver_branch: 'latest' is no driver branch"),
        ({"version": "new"}, "nvidia_driver_version: 'new' is no driver version"),
        ({"version": "580.95.05", "branch": "570"}, "580.95.05 is not of branch 570"),
        ({"source": "ppa"}, "nvidia_driver_source: 'ppa' is not one of"),
        ({"enabled": "maybe"}, "nvidia_driver_enabled: 'maybe' is not one of"),
        ({"toolkit_versions": ["latest"]}, "cuda_toolkit_versions: 'latest' is no CUDA version"),
    ],
)
def test_a_wish_that_cannot_be_understood_is_named(options: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(make.facts(), **options)

    assert line in caught.value.line()
