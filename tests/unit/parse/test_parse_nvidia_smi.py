"""nvidia-smi: banners, failures, lists, tables, -q, -q -x and CSV, also cut, mixed and broken."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Gpu
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import gpus, nvidia_query, nvidia_smi
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse.nvidia_values import mode, number, value, whole
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse.text import RefusedError

NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest"


@pytest.mark.parametrize(
    ("text", "driver", "cuda"),
    [
        ("| NVIDIA-SMI 550.127.05   Driver Version: 550.127.05   CUDA Version: 12.4 |", "550.127.05", "12.4"),
        ("| NVIDIA-SMI 595.78  Driver Version: 595.78  CUDA Version: 13.2 |", "595.78", "13.2"),
        ("NVIDIA-SMI 610.57.04  KMD Version: 610.57.04  CUDA UMD Version: 13.3", "610.57.04", "13.3"),
        ("| NVIDIA-SMI 550.127.05   Driver Version: 550.127.05   CUDA Version: N/A |", "550.127.05", None),
        ("Driver Version        : 590.44.01\nCUDA Version          : Not Found", "590.44.01", None),
        ("<driver_version>535.54.03</driver_version><cuda_version>12.2</cuda_version>", "535.54.03", "12.2"),
        ("| NVIDIA-SMI 470.86       Driver Version: 47", None, None),
    ],
)
def test_a_banner_of_any_generation_names_its_versions(text, driver, cuda):
    answer = nvidia_smi.answer(text, 0)

    assert (answer.state, answer.driver_version, answer.cuda_version) == ("ok", driver, cuda)


@pytest.mark.parametrize(
    ("text", "rc", "state"),
    [
        (NO_DRIVER, 9, "no_driver"),
        (NO_DRIVER.replace("'", "\u2019").replace("communicate with", "communicate\nwith"), None, "no_driver"),
        ("Failed to initialize NVML: Driver Not Loaded", 9, "no_driver"),
        ("No devices were found", 6, "no_devices"),
        (
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.126",
            18,
            "version_mismatch",
        ),
        ("Failed to initialize NVML: Unknown Error", 255, "unknown_error"),
        ("Failed to initialize NVML: Insufficient Permissions", 4, "no_permission"),
        ("Failed to initialize NVML: Some New Words", 1, "error"),
        ("bash: nvidia-smi: command not found", 127, "not_found"),
        ("nvidia-smi: command not found", None, "not_found"),
        ('Option "-p2p" is missing its value.', 2, "error"),
        ("", 9, "no_driver"),
        ("", 18, "version_mismatch"),
        ("", 124, "error"),
    ],
)
def test_each_failure_has_its_name(text, rc, state):
    assert nvidia_smi.answer(text, rc).state == state


def test_a_mismatch_tells_the_version_of_the_library():
    text = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.126\n"

    assert nvidia_smi.answer(text).library_version == "580.126"


@pytest.mark.parametrize(
    ("line", "lost"),
    [
        ("Unable to determine the device handle for GPU 0000:0B:00.0: Unknown Error", "0000:0B:00.0"),
        ("Unable to determine the device handle for GPU0000:07:00.0: Unknown Error", "0000:07:00.0"),
        ("Unable to determine the device handle for GPU1: 0000:34:00.0: Unknown Error", "0000:34:00.0"),
        ("Unable to determine the device handle for GPU 000:BA:80.0: Unknown Error", "000:BA:80.0"),
        ("Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost. Reboot the system", "0000:02:00.0"),
    ],
)
def test_a_lost_gpu_is_named_in_each_of_five_spellings_even_before_a_banner(line, lost):
    banner = "| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05   CUDA Version: 13.0 |"

    alone, followed = nvidia_smi.answer(line), nvidia_smi.answer(f"{line}\n{banner}\n", 15)

    assert (alone.state, alone.lost) == ("lost_gpu", (lost,))
    assert (followed.state, followed.lost, followed.driver_version) == ("lost_gpu", (lost,), "580.95.05")


def test_other_text_is_refused():
    with pytest.raises(RefusedError, match="no nvidia-smi banner"):
        nvidia_smi.answer("hello\n", 0)


def test_the_list_counts_mig_devices():
    text = (
        "GPU 0: NVIDIA A30 (UUID: GPU-aaaa)\n"
        "  MIG 2g.12gb     Device  0: (UUID: MIG-1)\n"
        "  MIG 2g.12gb     Device  1: (UUID: MIG-2)\n"
        "GPU 1: NVIDIA A30 (UUID: GPU-bbbb)\n"
    )

    first, second = nvidia_smi.gpu_list(text)

    assert (first.index, first.name, first.uuid, first.mig, first.mig_devices) == (
        0,
        "NVIDIA A30",
        "GPU-aaaa",
        "Enabled",
        2,
    )
    assert (second.index, second.mig, second.mig_devices) == (1, None, None)
    assert [(one.index, one.profile) for one in first.mig_instances] == [(0, "2g.12gb"), (1, "2g.12gb")]


def test_the_table_keeps_unreadable_cells_unknown(recorded):
    healthy, broken = nvidia_smi.table(recorded("nvidia_smi.table.txt"))

    assert (healthy.bus_id, healthy.persistence, healthy.pstate, healthy.power_draw_w) == (
        "0000:01:00.0",
        "Enabled",
        "P8",
        27.0,
    )
    assert (healthy.memory_total_mib, healthy.ecc, healthy.mig) == (97887, "Enabled", "Disabled")
    assert (broken.temperature_c, broken.pstate, broken.power_draw_w, broken.utilization_percent) == (None,) * 4
    assert (broken.memory_used_mib, broken.mig, broken.persistence) == (4, None, "Disabled")


def test_q_reads_each_gpu_by_its_indentation(recorded):
    first, second = nvidia_query.query_text(recorded("nvidia_smi.q.two_gpus.txt"))

    assert (first.index, first.bus_id, first.memory_total_mib, first.bar1_total_mib) == (
        0,
        "0000:01:00.0",
        97887,
        131072,
    )
    assert (first.virtualization_mode, first.recovery_action, first.gsp_firmware) == (
        "Pass-Through",
        "None",
        "590.44.01",
    )
    assert (first.link_gen_current, first.link_gen_max, first.link_width_current) == (1, 5, 16)
    assert (first.power_draw_w, first.power_limit_w, first.temperature_c) == (27.4, 600.0, 31)
    assert first.raw["Conf Compute Protected Memory Usage/Total"] == "0 MiB"
    assert not any("Serial" in path for path in first.raw)
    assert (second.recovery_action, second.memory_used_mib, second.bar1_total_mib) == ("Reset", None, None)
    assert (second.link_gen_current, second.link_width_max) == (None, None)


def test_q_says_no_index_where_a_gpu_is_missing_below(recorded):
    text = recorded("nvidia_smi.q.two_gpus.txt")
    cut = text[: text.index("GPU 00000000:02:00.0")]

    (only,) = nvidia_query.query_text(cut)

    assert (only.index, only.bus_id) == (None, "0000:01:00.0")


def test_q_survives_an_indented_paste_with_carriage_returns(recorded):
    text = recorded("nvidia_smi.q.two_gpus.txt")
    pasted = "".join(f"    {row}\r\n" for row in text.split("\n"))

    assert nvidia_query.query_text(pasted) == nvidia_query.query_text(text)


def test_xml_gives_what_stands_before_the_cut(recorded):
    (gpu,) = nvidia_query.query_xml(recorded("nvidia_smi.qx.cut.xml"))

    assert (gpu.bus_id, gpu.name, gpu.mig, gpu.mig_devices) == ("0000:01:00.0", "NVIDIA A30", "Enabled", 2)
    assert (gpu.memory_total_mib, gpu.bar1_total_mib, gpu.link_width_current) == (24576, 32768, 8)
    assert (gpu.recovery_action, gpu.power_draw_w, gpu.power_limit_w) == ("Reset", 28.11, None)
    # attached_gpus says 2, one element follows: its number is not known.
    assert gpu.index is None


def test_xml_with_entities_is_refused():
    with pytest.raises(RefusedError, match="entities"):
        nvidia_query.query_xml('<!DOCTYPE x [<!ENTITY a "b">]><nvidia_smi_log><gpu id="1">&a;</gpu></nvidia_smi_log>')


def test_csv_judges_each_cell_by_itself():
    text = (
        "index, name, pci.bus_id, pstate, temperature.gpu, power.draw [W], pcie.link.width.current, memory.used [MiB]\n"
        "0, NVIDIA A30, 00000000:C1:00.0, [GPU requires reset], [N/A], ERR!, [Unknown Error], 12 MiB\n"
        "1, NVIDIA A30, 00000000:C2:00.0, P0, 40, 31.50 W, 16, 7"
    )

    broken, healthy = nvidia_query.query_csv(text)

    assert (broken.bus_id, broken.memory_used_mib) == ("0000:c1:00.0", 12)
    assert (broken.pstate, broken.temperature_c, broken.power_draw_w, broken.link_width_current) == (None,) * 4
    assert (healthy.pstate, healthy.temperature_c, healthy.power_draw_w, healthy.link_width_current) == (
        "P0",
        40,
        31.5,
        16,
    )


def test_csv_drops_the_last_cell_of_a_cut_row():
    (gpu,) = nvidia_query.query_csv("name, pci.bus_id, memory.total [MiB]\nNVIDIA A30, 00000000:C1:0")

    assert (gpu.name, gpu.bus_id, gpu.memory_total_mib) == ("NVIDIA A30", "", None)


@pytest.mark.parametrize("text", ["", "a, b\n1, 2\n", "name, pci.bus_id\n", "0, NVIDIA A30, 00000000:01:00.0\n"])
def test_csv_without_a_header_or_a_row_is_refused(text):
    with pytest.raises(RefusedError):
        nvidia_query.query_csv(text)


@pytest.mark.parametrize(
    "cell",
    [
        "[N/A]",
        "N/A",
        "[Not Supported]",
        "[Unknown Error]",
        "[GPU requires reset]",
        "GPU requires reset",
        "ERR!",
        "??",
        "",
        "[Function Not Found]",
        "[Insufficient Permissions]",
        "Requested functionality has been deprecated",
        "Unknown",
    ],
)
def test_a_cell_without_a_value_is_none_and_never_zero(cell):
    assert (value(cell), number(cell), whole(cell), mode(cell)) == (None, None, None, None)


def test_readings_of_the_same_gpu_are_joined():
    cut = Gpu(index=0, bus_id="0000:01:00.0", name="NVIDIA RTX PRO 6000 Blac...", pstate="P8")
    listed = Gpu(index=0, name="NVIDIA RTX PRO 6000 Blackwell Server Edition", uuid="GPU-1")
    other = Gpu(index=1, bus_id="0000:02:00.0", name="NVIDIA A30")

    joined, alone = gpus.merge([("table", [cut, other]), ("list", [listed])])

    assert (joined.name, joined.uuid, joined.pstate) == ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "GPU-1", "P8")
    assert (joined.sources, alone.sources) == (("table", "list"), ("table",))


def test_redacted_uuids_join_nothing():
    zeros = "GPU-00000000-0000-0000-0000-000000000000"

    assert len(gpus.merge([("a", [Gpu(index=0, uuid=zeros)]), ("b", [Gpu(index=1, uuid=zeros)])])) == 2
