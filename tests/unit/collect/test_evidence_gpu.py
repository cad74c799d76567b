"""What the GPU sources keep on the machine, and the device nodes that they list."""

from __future__ import annotations

import re

import pytest

from ansible_collections.peerlane.gpu.plugins.module_utils import evidence, evidence_probes
from ansible_collections.peerlane.gpu.plugins.module_utils.evidence_sources import SOURCES


def masked(source: str, text: str) -> str:
    (one,) = (one for one in SOURCES if one["source"] == source)
    for key in ("mask", "mask_serials"):
        text = re.sub(one[key], evidence._mask, text) if key in one else text
    return text


@pytest.mark.parametrize(
    ("source", "text", "kept"),
    [
        (
            "nvidia_smi.q",
            "    Serial Number                         : 1654321000111\n",
            "    Serial Number                         : [masked]\n",
        ),
        (
            "nvidia_smi.q",
            "        Chassis Serial Number             : ABC123\n        Slot Number : 1\n",
            "        Chassis Serial Number             : [masked]\n        Slot Number : 1\n",
        ),
        ("nvidia_smi.q", "    Serial Number     : N/A\n    Product Name : A B\n", None),
        ("nvidia_smi.q", "        Chassis Serial Number   : \n", None),
        (
            "nvidia_smi.q",
            "            Name                          : /opt/bin/python3 -m serve --token hf_x\n",
            "            Name                          : /opt/bin/python3 [masked]\n",
        ),
        ("nvidia_smi.q", "            Name                          : /opt/bin/python3\n", None),
        (
            "kernel_log",
            "[ 1.0] NVRM: GPU Board Serial Number: 1654321000111\n",
            "[ 1.0] NVRM: GPU Board Serial Number: [masked]\n",
        ),
        (
            "kernel_log",
            "NVRM: GPU 0000:02:00.0: GPU serial number is 165.\n",
            "NVRM: GPU 0000:02:00.0: GPU serial number is [masked].\n",
        ),
        ("kernel_log", "NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.\n", None),
    ],
)
def test_serial_numbers_and_arguments_stay_on_the_machine(source, text, kept):
    assert masked(source, text) == (text if kept is None else kept)


def test_device_nodes_are_listed(tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia-uvm", "nvidiactl", "null", "nvidia-caps"):
        (tmp_path / "dev" / name).touch()

    assert evidence_probes.nvidia_devices(str(tmp_path)) == "/dev/nvidia-uvm\n/dev/nvidia0\n/dev/nvidiactl\n"
    with pytest.raises(evidence_probes.NotHereError):
        evidence_probes.nvidia_devices(str(tmp_path / "elsewhere"))
