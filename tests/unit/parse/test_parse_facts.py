"""A reading is remembered for the next host that answers the same, and for no other question."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.evidence import Evidence, EvidenceSet
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import facts, lspci, pci_sysfs
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse.facts import Reading, Sources
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse.text import RefusedError


def sources(text: str, source: str = "uname", **entry: str) -> Sources:
    return Sources(EvidenceSet("h", entries={source: Evidence(source, text, **entry)}))  # type: ignore[arg-type]


def _word(at: int, text: str) -> Reading[str]:
    return text.split()[at], text


def test_equal_answers_of_two_hosts_are_read_once() -> None:
    seen = []

    def read(text: str) -> Reading[str]:
        return seen.append(text) or text, text

    counted = partial(_counted, (read,))
    first, second = (sources("the same words").fact(counted, "uname") for _ in range(2))
    assert first is second
    assert seen == ["the same words"]


def _counted(read: tuple[Callable[[str], Reading[str]]], text: str) -> Reading[str]:
    return read[0](text)


def test_another_question_text_source_or_complaint_is_read_anew() -> None:
    one = sources("a b").fact(partial(_word, 0), "uname")
    assert one.value == "a"
    assert sources("a b").fact(partial(_word, 1), "uname").value == "b"
    assert sources("c b").fact(partial(_word, 0), "uname").value == "c"
    assert sources("a b", "proc.version").fact(partial(_word, 0), "proc.version").source == "proc.version"
    assert sources("a b", stderr="oh").fact(partial(_word, 0), "uname").excerpt == "a b\noh"


@pytest.mark.parametrize("own", ["x", "y"])
def test_a_reader_that_knows_its_host_is_never_remembered(own: str) -> None:
    assert sources("a b").fact(lambda text: (own, text), "uname").value == own


def test_a_refusal_and_a_silence_are_told_each_time() -> None:
    def refuse(text: str) -> Reading[str]:
        raise RefusedError(f"is {text}")

    for _ in range(2):
        assert sources("odd").fact(refuse, "uname").reason == "uname: is odd"
        assert sources("odd").fact(lambda text: None, "uname").reason == "uname does not tell"


def test_the_memory_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_remembered", {})
    monkeypatch.setattr(facts, "_MOST_REMEMBERED", 3)
    for number in range(10):
        sources(f"n{number}").fact(partial(_word, 0), "uname")
        assert len(facts._remembered) <= 3
    sources("x" * facts._LONGEST_REMEMBERED).fact(partial(_word, 0), "uname")
    assert all(len(key[2]) < facts._LONGEST_REMEMBERED for key in facts._remembered)


BLOCK = "[0000:{}:00.0]\nvendor: 0x10de\ndevice: 0x2bb5\nclass: 0x030200\ncurrent_link_width: 16\ndriver: {}\n"
PLAIN = BLOCK.format("01", "nvidia") + "\n" + BLOCK.format("02", "") + "\n"


@pytest.mark.parametrize(
    "spoilt",
    [
        PLAIN.replace("\n", "\r\n"),
        "\n".join(f"    {row}" for row in PLAIN.split("\n")),
        PLAIN.replace("\n\n", "\n \n"),
        f"$ cat x\n{PLAIN}",
        PLAIN.replace("[", "--- ").replace("]", " ---"),
    ],
)
def test_blocks_of_the_collector_read_like_those_that_a_person_pasted(spoilt: str) -> None:
    assert pci_sysfs.functions(spoilt) == pci_sysfs.functions(PLAIN) != {}


def test_a_block_that_comes_twice_is_joined() -> None:
    split = "[0000:01:00.0]\nvendor: 0x10de\n\n[0000:01:00.0]\ndevice: 0x2bb5\n"
    assert pci_sysfs.functions(split) == pci_sysfs.functions("[0000:01:00.0]\nvendor: 0x10de\ndevice: 0x2bb5\n")


def test_a_block_that_was_cut_is_not_taken_for_the_whole_one() -> None:
    whole = pci_sysfs.functions(PLAIN)
    cut = pci_sysfs.functions(PLAIN[: PLAIN.rindex("width: 16")])
    assert (whole["0000:02:00.0"].link_width, cut["0000:02:00.0"].link_width) == (16, None)


LSPCI = """00:01.1 PCI bridge [0604]: AMD Bridge [1022:14ab] (rev 01)
	Bus: primary=00, secondary=01, subordinate=01, sec-latency=0

01:00.0 3D controller [0302]: NVIDIA Corporation GB202GL [10de:2bb5] (rev a1)
	Capabilities: [134 v1] Physical Resizable BAR
		BAR 1: current size: 256MB, supported: 64MB 128MB 256MB

02:00.0 3D controller [0302]: NVIDIA Corporation GB202GL [10de:2bb5] (rev a1)
	Capabilities: [134 v1] Physical Resizable BAR
		BAR 1: current size: 256MB, supported: 64MB 128M
"""


@pytest.mark.parametrize("cut", range(0, len(LSPCI) + 1, 7))
@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\n--\n", "\n\tKernel driver in use: nvidia\n"])
def test_a_listing_in_blocks_reads_as_in_one_pass(cut: int, end: str) -> None:
    text = LSPCI[:cut] + end
    whole, headless = lspci.blocks(text)
    found, fragments = lspci.read(text)
    assert found == lspci._by_address(whole) == lspci.functions(text)
    assert fragments == tuple(one.function() for one in headless)
    assert lspci.read(text) == (found, fragments)
