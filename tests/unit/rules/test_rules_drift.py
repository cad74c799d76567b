"""Drift: differences between hosts of one kind, never an unknown for a difference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.runtime import Engine
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Kernel, Limits, Services, Snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules.drift import Aspect, Drift, compare


def guest(host: str, driver: str = "580.95.05", **parts: object) -> Snapshot:
    made = {
        "driver": b.Driver(smi=b.smi(driver_version=driver), loaded_version=b.fact(driver)),
        "gpus": b.smi_gpus(2, power_limit_w=600.0, persistence="Enabled", raw={"VBIOS Version": "98.02.55.00.01"}),
    }
    return b.guest(2, host, **{**made, **parts})


def drift(*hosts: Snapshot) -> Drift:
    return compare({one.host: one for one in hosts})


def difference(key: str, *hosts: Snapshot) -> Aspect | None:
    (group,) = drift(*hosts).groups
    return next((one for one in group.differences if one.key == key), None)


def unread(key: str, *hosts: Snapshot) -> dict[str, tuple[str, ...]]:
    (group,) = drift(*hosts).groups
    found = next((one for one in group.unknown if one.key == key), None)
    return {one.reason: one.hosts for one in found.unknown} if found else {}


def command_line(text: str) -> Kernel:
    return Kernel(command_line=b.fact(b.line(text)))


def nccl(**values: str) -> object:
    return b.settings(**values)


def engines(path: str, **options: str) -> Services:
    named = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    return Services(engines=b.fact((Engine("vllm", "unit x", command=f"{path}/bin/vllm serve", options=named),)))


def test_the_majority_is_named_and_the_outliers_are_listed() -> None:
    found = difference("driver.version", guest("a"), guest("b"), guest("c", "570.86.10"), guest("d"))

    assert found is not None
    assert found.majority is not None
    assert (found.majority.value, found.majority.hosts) == ("580.95.05", ("a", "b", "d"))
    assert [(one.value, one.hosts) for one in found.others] == [("570.86.10", ("c",))]


@pytest.mark.parametrize("versions", [("1", "2"), ("1", "2", "3"), ("1", "1", "2", "2")])
def test_there_is_no_majority_where_no_value_has_more_hosts_than_any_other(versions: tuple[str, ...]) -> None:
    found = difference("driver.version", *(guest(f"h{at}", one) for at, one in enumerate(versions)))

    assert found is not None
    assert found.majority is None
    assert {one.value for one in found.others} == set(versions)


def test_an_unknown_is_listed_and_is_no_difference() -> None:
    silent = replace(guest("c"), driver=b.Driver())
    hosts = (guest("a"), guest("b"), silent)

    assert difference("driver.version", *hosts) is None
    assert unread("driver.version", *hosts) == {"not collected": ("c",)}
    assert "NVIDIA driver" in drift(*hosts).groups[0].same  # of those that tell it


def test_one_value_alone_agrees_with_nobody() -> None:
    hosts = (guest("a"), replace(guest("b"), driver=b.Driver()))

    assert "NVIDIA driver" not in drift(*hosts).groups[0].same


def test_a_gpu_that_does_not_tell_makes_the_value_of_its_host_unknown() -> None:
    part = b.fact((replace(b.smi_gpus(1, power_limit_w=600.0).value[0]), b.smi_gpus(2).value[1]))
    hosts = (guest("a"), replace(guest("b"), gpus=part))

    assert difference("gpus.power_limit", *hosts) is None
    assert unread("gpus.power_limit", *hosts) == {"not told for 1 of 2 GPUs": ("b",)}


def test_gpus_of_one_host_that_differ_are_counted() -> None:
    first, second = b.smi_gpus(2, power_limit_w=600.0).value
    mixed = replace(guest("b"), gpus=b.fact((first, replace(second, power_limit_w=450.0))))
    found = difference("gpus.power_limit", guest("a"), mixed)

    assert found is not None
    assert {one.value for one in found.others} == {"600 W", "450 W (1), 600 W (1)"}


@pytest.mark.parametrize(
    ("key", "first", "second", "values"),
    [
        ("kernel.command_line.iommu", command_line("iommu=pt"), command_line("quiet iommu=off"), {"pt", "off"}),
        ("kernel.command_line.quiet", command_line("quiet"), command_line("iommu=pt"), {"given", "not set"}),
        ("kernel.command_line.pci", command_line("pci=a pci=b"), command_line("pci=a"), {"a b", "a"}),
        (
            "kernel.release",
            Kernel(release=b.fact("6.8.0-1")),
            Kernel(release=b.fact("6.8.0-2")),
            {"6.8.0-1", "6.8.0-2"},
        ),
    ],
)
def test_the_kernel_is_compared_token_by_token(key: str, first: Kernel, second: Kernel, values: set[str]) -> None:
    found = difference(key, guest("a", kernel=first), guest("b", kernel=second))

    assert found is not None
    assert {one.value for one in found.others} == values


def test_what_names_a_host_s_own_disk_is_no_drift() -> None:
    first = command_line("BOOT_IMAGE=/a root=UUID=1 resume=UUID=2 rd.luks.uuid=3 iommu=pt")
    second = command_line("BOOT_IMAGE=/b root=UUID=8 resume=UUID=9 iommu=pt")
    (group,) = drift(guest("a", kernel=first), guest("b", kernel=second)).groups

    assert not group.differences
    assert "kernel command line" in group.same


@pytest.mark.parametrize(
    ("key", "parts", "values"),
    [
        ("nccl.settings.NCCL_P2P_DISABLE", [{"nccl": nccl(NCCL_P2P_DISABLE="1")}, {"nccl": nccl()}], {"1", "not set"}),
        (
            "services.engines.vllm",
            [{"services": engines("/opt/peerlane/engines/vllm-0.11.0")}, {"services": engines("/usr")}],
            {"0.11.0", "version not told"},
        ),
        (
            "services.options.vllm --tensor-parallel-size",
            [{"services": engines("/x", tensor_parallel_size=one)} for one in ("8", "4")],
            {"8", "4"},
        ),
        (
            "limits.Max locked memory",
            [{"limits": Limits(values=b.fact({"Max locked memory": one}))} for one in (-1, 65536)],
            {"unlimited", "65536"},
        ),
        (
            "machine.bios",
            [{"machine": b.Machine(virt=b.fact("kvm"), bios_version=b.fact(one))} for one in ("1.2", "1.3")],
            {"1.2", "1.3"},
        ),
    ],
)
def test_what_runs_is_compared(key: str, parts: list[dict[str, object]], values: set[str]) -> None:
    found = difference(key, *(guest(f"h{at}", **one) for at, one in enumerate(parts)))

    assert found is not None
    assert {one.value for one in found.others} == values


def test_where_a_host_is_reached_is_no_drift() -> None:
    hosts = [guest(f"h{at}", services=engines("/x", port=str(8000 + at), host=f"192.0.2.{at}")) for at in range(2)]

    assert not drift(*hosts).groups[0].differences


def test_a_missing_gpu_is_a_difference_within_the_group() -> None:
    found = difference("gpus", guest("a"), guest("b"), b.guest(1, "c"))

    assert found is not None
    assert [one.value for one in found.others] == ["1x RTX PRO 6000 Blackwell Server"]


def test_only_hosts_of_one_role_and_model_are_compared() -> None:
    ada = b.guest(2, "ada", pci=b.pci(*b.gpus_on_bus(2, b.RTX_6000_ADA)))
    found = drift(guest("a"), guest("b"), ada, b.hypervisor(host="node"), b.snapshot(None, "what"))

    assert [(one.role, one.hosts) for one in found.groups] == [("guest", ("a", "b"))]
    assert {host for one in found.not_compared for host in one.hosts} == {"ada", "node", "what"}
    assert all(one.reason for one in found.not_compared)


def test_a_hypervisor_is_not_asked_for_what_its_guests_run() -> None:
    (group,) = drift(b.hypervisor(host="n1"), b.hypervisor(host="n2")).groups

    asked = {one.key for one in group.unknown}
    assert "vm.pve_version" in asked
    assert not {key for key in asked if key.startswith(("driver.", "nccl.", "services."))}


def test_one_host_is_no_fleet() -> None:
    assert drift(guest("a")) == Drift()


def test_the_order_of_the_hosts_does_not_matter() -> None:
    hosts = [guest("b"), guest("a", "570.1"), guest("c")]

    assert drift(*hosts) == drift(*reversed(hosts))
