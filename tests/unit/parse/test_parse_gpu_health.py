"""What nvidia-smi tells of a GPU's health in its formats and generations, and what runs on it. All values are made."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import GpuProcess, MigInstance, NvLinks
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import gpus, nvidia_query, nvidia_smi, nvlink
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse.text import RefusedError

# As R570 and later print it; the column of the colon is 55 there.
MODERN = """Attached GPUs                                          : 1
GPU 00000000:C1:00.0
    Product Name                                       : NVIDIA RTX PRO 6000 Blackwell Server Edition
    MIG Mode
        Current                                        : Enabled
        Pending                                        : Disabled
    MIG Device
        Index                                          : 0
        GPU Instance ID                                : 3
        FB Memory Usage
            Total                                      : 24064 MiB
            Used                                       : 12 MiB
        BAR1 Memory Usage
            Total                                      : 32767 MiB
    MIG Device
        Index                                          : 1
        FB Memory Usage
            Total                                      : 48128 MiB
    Serial Number                                      : 1650000000000
    PCI
        Device Id                                      : 0x2BB510DE
        GPU Link Info
            PCIe Generation
                Host Max                               : 5
    Clocks Event Reasons
        Idle                                           : Not Active
        HW Slowdown                                    : Active
            HW Thermal Slowdown                        : Not Active
            HW Power Brake Slowdown                    : Active
        SW Power Cap                                   : Active
    Clocks Event Reasons Counters
        SW Power Capping                               : 182086 us
    Conf Compute Protected Memory Usage
        Total                                          : 0 MiB
    ECC Mode
        Current                                        : Enabled
        Pending                                        : Disabled
    ECC Errors
        Volatile
            SRAM Correctable                           : 9
            SRAM Uncorrectable Parity                  : 1
            SRAM Uncorrectable SEC-DED                 : 2
            DRAM Correctable                           : 0
            DRAM Uncorrectable                         : 4
        Aggregate
            SRAM Uncorrectable Parity                  : 1
            SRAM Uncorrectable SEC-DED                 : 2
            DRAM Uncorrectable                         : 40
            SRAM Threshold Exceeded                    : No
        Channel Repair Pending                         : Yes
        TPC Repair Pending                             : No
        Unrepairable Memory                            : No
    Retired Pages
        Pending Page Blacklist                         : N/A
    Remapped Rows
        Correctable Error                              : 0
        Pending                                        : Yes
        Remapping Failure Occurred                     : No
        Bank Remap Availability Histogram
            Max                                        : 192 bank(s)
    GPU Power Readings
        Average Power Draw                             : 88.10 W
        Current Power Limit                            : 450.00 W
        Default Power Limit                            : 600.00 W
        Min Power Limit                                : 300.00 W
        Max Power Limit                                : 600.00 W
    Module Power Readings
        Current Power Limit                            : N/A
    Clocks
        SM                                             : 2280 MHz
    Max Clocks
        SM                                             : 2430 MHz
    Fabric
        State                                          : Completed
        Status                                         : Success
    Processes
        GPU instance ID                                : N/A
        Process ID                                     : 4242
            Type                                       : C
            Name                                       : /opt/engine/bin/python3 -m serve --token hf_secret
            Used GPU Memory                            : 80000 MiB
        Process ID                                     : 77
            Type                                       : G
            Name                                       : /usr/lib/xorg/Xorg
    Capabilities
        EGM                                            : disabled
"""


def test_q_tells_the_health_of_a_gpu():
    query = nvidia_query.read_text(MODERN)
    (gpu,) = query.gpus

    assert (gpu.mig, gpu.mig_pending, gpu.mig_devices) == ("Enabled", "Disabled", 2)
    assert gpu.mig_instances == (MigInstance(0, "", 24064), MigInstance(1, "", 48128))
    assert (gpu.device_id, gpu.link_gen_host_max, gpu.conf_compute_mib) == ("2bb5", 5, 0)
    assert (gpu.ecc, gpu.ecc_pending) == ("Enabled", "Disabled")
    assert (gpu.ecc_uncorrected_volatile, gpu.ecc_uncorrected_aggregate) == (7, 43)
    assert (gpu.sram_threshold_exceeded, gpu.channel_repair_pending, gpu.tpc_repair_pending) == ("No", "Yes", "No")
    assert (gpu.remap_pending, gpu.remap_failed, gpu.unrepairable_memory) == ("Yes", "No", "No")
    assert (gpu.power_limit_w, gpu.power_limit_default_w, gpu.power_limit_min_w, gpu.power_limit_max_w) == (
        450.0,
        600.0,
        300.0,
        600.0,
    )
    assert (gpu.sm_clock_mhz, gpu.sm_clock_max_mhz, gpu.power_draw_w) == (2280, 2430, 88.1)
    assert (gpu.fabric_state, gpu.fabric_status) == ("Completed", "Success")
    assert {name for name, on in gpu.clock_reasons.items() if on} == {"hw_slowdown", "hw_power_brake", "sw_power_cap"}
    assert gpu.blank == {"retired_pending"}
    assert query.attached == 1


def test_a_process_is_its_program_alone_and_no_serial_number_is_kept():
    query = nvidia_query.read_text(MODERN)

    assert query.processes == (
        GpuProcess("0000:c1:00.0", 4242, "C", "python3", 80000),
        GpuProcess("0000:c1:00.0", 77, "G", "Xorg", None),
    )
    assert "secret" not in repr(query)
    assert "1650000000000" not in repr(query)


@pytest.mark.parametrize(("line", "processes"), [("    Processes                    : None\n", ()), ("", None)])
def test_no_process_and_no_word_of_processes_differ(line, processes):
    assert (
        nvidia_query.read_text(f"GPU 00000000:01:00.0\n    Product Name    : NVIDIA A30\n{line}").processes == processes
    )


def test_old_words_mean_the_same():
    text = (
        "GPU 00000000:01:00.0\n"
        "    Clocks Throttle Reasons\n"
        "        HW Slowdown                 : Active\n"
        "            HW Thermal Slowdown     : Active\n"
        "    Ecc Mode\n"
        "        Current                     : Enabled\n"
        "    ECC Errors\n"
        "        Volatile\n"
        "            Double Bit\n"
        "                Device Memory       : 2\n"
        "                Total               : 2\n"
        "    Power Readings\n"
        "        Power Draw                  : 60.00 W\n"
        "        Power Limit                 : 250.00 W\n"
        "        Default Power Limit         : 250.00 W\n"
        "    GPU Reset Status\n"
        "        Reset Required              : Yes\n"
    )
    (gpu,) = nvidia_query.query_text(text)

    assert (gpu.clock_reasons["hw_slowdown"], gpu.clock_reasons["hw_thermal"]) == (True, True)
    assert (gpu.ecc, gpu.ecc_uncorrected_volatile) == ("Enabled", 2)
    assert (gpu.power_limit_w, gpu.power_limit_default_w, gpu.recovery_action) == (250.0, 250.0, "Reset")


def test_a_number_that_a_cut_may_have_shortened_is_none():
    head = "GPU 00000000:01:00.0\n    GPU Power Readings\n        Current Power Limit    : "

    assert nvidia_query.query_text(f"{head}60")[0].power_limit_w is None
    assert nvidia_query.query_text(f"{head}600.00 W")[0].power_limit_w == 600.0


def test_lines_that_a_terminal_broke_do_not_end_the_block():
    text = (
        "GPU 00000000:01:00.0\n"
        "    Display Mode                 : Requested functionality has been depre\n"
        "cated\n"
        "    Persistence Mode             : Enabled\n"
        "    GPU Recovery Action          : Reset\n"
    )
    (gpu,) = nvidia_query.query_text(text)

    assert (gpu.persistence, gpu.recovery_action) == ("Enabled", "Reset")


def xml(body: str, attached: int = 1) -> str:
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
        f'<attached_gpus>{attached}</attached_gpus>\n<gpu id="00000000:41:00.0">{body}</gpu>\n</nvidia_smi_log>\n'
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "<clocks_throttle_reasons><clocks_throttle_reason_hw_slowdown>Active</clocks_throttle_reason_hw_slowdown>"
            "</clocks_throttle_reasons>",
            {"clock_reasons": {"hw_slowdown": True}},
        ),
        (
            "<clocks_event_reasons><clocks_event_reason_gpu_idle>Not Active</clocks_event_reason_gpu_idle>"
            "</clocks_event_reasons>",
            {"clock_reasons": {"idle": False}},
        ),
        (
            "<ecc_errors><volatile><double_bit><total>5</total></double_bit></volatile></ecc_errors>",
            {"ecc_uncorrected_volatile": 5},
        ),
        (
            "<ecc_errors><volatile><sram_uncorrectable>1</sram_uncorrectable><dram_uncorrectable>2</dram_uncorrectable>"
            "</volatile><channel_repair_pending>Yes</channel_repair_pending></ecc_errors>",
            {"ecc_uncorrected_volatile": 3, "channel_repair_pending": "Yes"},
        ),
        (
            "<ecc_errors><aggregate><sram_uncorrectable_parity>1</sram_uncorrectable_parity>"
            "<sram_uncorrectable_secded>1</sram_uncorrectable_secded>"
            "<sram_threshold_exceeded>Yes</sram_threshold_exceeded></aggregate></ecc_errors>",
            {"ecc_uncorrected_aggregate": 2, "sram_threshold_exceeded": "Yes"},
        ),
        (
            "<remapped_rows><remapped_row_pending>Yes</remapped_row_pending>"
            "<remapped_row_failure>No</remapped_row_failure></remapped_rows>",
            {"remap_pending": "Yes", "remap_failed": "No"},
        ),
        (
            "<retired_pages><pending_retirement>Yes</pending_retirement></retired_pages>",
            {"retired_pending": "Yes"},
        ),
        (
            "<power_readings><power_limit>250.00 W</power_limit><default_power_limit>300.00 W</default_power_limit>"
            "</power_readings>",
            {"power_limit_w": 250.0, "power_limit_default_w": 300.0},
        ),
        (
            "<gpu_power_readings><instant_power_draw>61.00 W</instant_power_draw>"
            "<min_power_limit>100.00 W</min_power_limit></gpu_power_readings>",
            {"power_draw_w": 61.0, "power_limit_min_w": 100.0},
        ),
        ("<pci><pci_device_id>20B210DE</pci_device_id></pci>", {"device_id": "20b2"}),
        ("<fabric><state>In Progress</state></fabric>", {"fabric_state": "In Progress"}),
        ("<gpu_reset_status><reset_required>Yes</reset_required></gpu_reset_status>", {"recovery_action": "Reset"}),
    ],
)
def test_xml_of_each_generation(body, expected):
    (gpu,) = nvidia_query.query_xml(xml(body))

    assert {name: getattr(gpu, name) for name in expected} == expected


def test_xml_tells_processes_and_mig_devices():
    query = nvidia_query.read_xml(
        xml(
            "<mig_devices><mig_device><index>2</index><fb_memory_usage><total>9856 MiB</total></fb_memory_usage>"
            "</mig_device></mig_devices><processes><process_info><pid>11</pid><type>C</type>"
            "<process_name>/bin/worker --key=x</process_name><used_memory>5 MiB</used_memory></process_info>"
            "</processes>",
            attached=4,
        )
    )

    assert query.gpus[0].mig_instances == (MigInstance(2, "", 9856),)
    assert query.processes == (GpuProcess("0000:41:00.0", 11, "C", "worker", 5),)
    assert (query.attached, query.gpus[0].index) == (4, None)
    assert nvidia_query.read_xml(xml("<processes></processes>")).processes == ()
    assert nvidia_query.read_xml(xml("<uuid>x</uuid>")).processes is None


@pytest.mark.parametrize(
    ("header", "row", "expected"),
    [
        ("index, power.limit [W], power.default_limit [W]", "0, 450.00 W, 600.00 W", (450.0, 600.0)),
        ("index, power.limit [W], power.default_limit [W]", "0, 450.00, 600.00", (450.0, 600.0)),
        ("index, power.limit [W], power.default_limit [W]", "0, [N/A], [Not Supported]", (None, None)),
    ],
)
def test_csv_with_and_without_units(header, row, expected):
    (gpu,) = nvidia_query.query_csv(f"{header}\n{row}\n")

    assert (gpu.power_limit_w, gpu.power_limit_default_w) == expected
    assert ("power_limit_w" in gpu.blank) is (expected[0] is None)


@pytest.mark.parametrize("name", ["clocks_event_reasons.active", "clocks_throttle_reasons.active"])
def test_the_bit_mask_names_its_reasons(name):
    (gpu,) = nvidia_query.query_csv(f"index, {name}\n0, 0x0000000000000048\n")

    assert {word for word, on in gpu.clock_reasons.items() if on} == {"hw_slowdown", "hw_thermal"}


def test_rows_that_come_again_are_samples():
    query = nvidia_query.read_csv(
        "timestamp, index, pci.bus_id, utilization.gpu [%], power.draw [W]\n"
        "2031/05/06 10:00:00.500, 0, 00000000:01:00.0, 3 %, 40.00 W\n"
        "2031/05/06 10:00:00.501, 1, 00000000:02:00.0, 0 %, 30.00 W\n"
        "2031/05/06 10:01:10.500, 0, 00000000:01:00.0, 100 %, 131.00 W\n"
    )

    assert [(gpu.index, gpu.utilization_percent) for gpu in query.gpus] == [(0, 100), (1, 0)]
    assert [(one.gpu, one.at_s, one.power_w) for one in query.samples] == [
        ("0000:01:00.0", 0.0, 40.0),
        ("0000:02:00.0", pytest.approx(0.001, abs=1e-6), 30.0),
        ("0000:01:00.0", 70.0, 131.0),
    ]


def test_a_list_of_several_gpus_is_no_series_of_samples():
    assert nvidia_query.read_csv("index, utilization.gpu [%]\n0, 3 %\n1, 4 %\n").samples == ()


def test_dmon_gives_samples():
    text = (
        "# gpu    pwr  gtemp  mtemp     sm    mem    enc    dec   mclk   pclk\n"
        "# Idx      W      C      C      %      %      %      %    MHz    MHz\n"
        "    0    131     48      -    100      2      0      0  12481   2422\n"
        "    1     30     35      -      0      0      0      0    405    210\n"
        "    0    132     48      -    100      2      0      0  12481   2422\n"
        "    0    13"
    )
    found = nvidia_smi.dmon(text)

    assert [(one.gpu, one.at_s, one.utilization_percent, one.power_w, one.sm_clock_mhz) for one in found] == [
        ("0", 0.0, 100, 131.0, 2422),
        ("1", 0.0, 0, 30.0, 210),
        ("0", 1.0, 100, 132.0, 2422),
    ]
    with pytest.raises(RefusedError):
        nvidia_smi.dmon("0 1 2\n")


def test_the_box_of_processes():
    box = "| Processes:                            |\n|  GPU   GI   CI   PID   Type   Process name  GPU Memory |\n"
    rows = (
        "|    0   N/A  N/A      4242      C   /opt/x/python3                  788MiB |\n"
        "|    1     2    0       77      C+G  ...ib/xorg/Xorg                    N/A |\n"
    )

    assert nvidia_smi.processes(box + rows) == (
        GpuProcess("0", 4242, "C", "python3", 788),
        GpuProcess("1", 77, "C+G", "Xorg", None),
    )
    assert nvidia_smi.processes(f"{box}|  No running processes found                       |\n") == ()
    assert nvidia_smi.processes(box) is None
    assert nvidia_smi.processes("| GPU  Name |\n") is None


def test_compute_apps():
    text = "pid, gpu_bus_id, process_name, used_gpu_memory [MiB]\n4242, 00000000:01:00.0, /opt/x/python3, 788 MiB\n"

    assert nvidia_query.compute_apps(text) == (GpuProcess("0000:01:00.0", 4242, "C", "python3", 788),)
    assert nvidia_query.compute_apps("pid, process_name\n") == ()


def test_mig_devices_of_two_outputs_are_one_list():
    listed = nvidia_smi.gpu_list(
        "GPU 0: NVIDIA A30 (UUID: GPU-aaaa)\n"
        "  MIG 1g.6gb     Device  0: (UUID: MIG-1)\n"
        "  MIG 2g.12gb    Device  1: (UUID: MIG-2)\n"
    )
    told = nvidia_query.query_text(
        "Attached GPUs : 1\nGPU 00000000:01:00.0\n    GPU UUID    : GPU-aaaa\n    MIG Device\n        Index    : 1\n"
        "        FB Memory Usage\n            Total    : 12032 MiB\n"
    )
    (merged,) = gpus.merge([("nvidia_smi.q", told), ("nvidia_smi.L", listed)])

    (other,) = gpus.merge([("nvidia_smi.L", listed), ("nvidia_smi.q", told)])

    assert merged.mig_instances == other.mig_instances == (MigInstance(0, "1g.6gb"), MigInstance(1, "2g.12gb", 12032))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "GPU 0: NVIDIA GeForce RTX 3090 (UUID: GPU-a)\n\t Link 0: 14.062 GB/s\n\t Link 1: <inactive>\n",
            (NvLinks(0, "NVIDIA GeForce RTX 3090", {0: 14.062, 1: None}),),
        ),
        (
            "GPU 0: NVIDIA A30 (UUID: GPU-a)\nNVML: Unable to retrieve Nvlink information as all links are inActive\n",
            (NvLinks(0, "NVIDIA A30", {}, "Unable to retrieve Nvlink information as all links are inActive"),),
        ),
        (
            "GPU 0: NVIDIA A30 (UUID: GPU-a)\nNvlink queries are not supported for Devices in MIG mode\n",
            (NvLinks(0, "NVIDIA A30", {}, "Nvlink queries are not supported for Devices in MIG mode"),),
        ),
        ("GPU 0: NVIDIA A30 (UUID: GPU-a)\n\t Link 0: 25 GB/s\n\t Link 1: 2", (NvLinks(0, "NVIDIA A30", {0: 25.0}),)),
        ("", ()),
    ],
)
def test_nvlinks(text, expected):
    assert nvlink.parse(text) == expected


def test_what_is_no_nvlink_output_is_refused():
    with pytest.raises(RefusedError):
        nvlink.parse("hello\n")
