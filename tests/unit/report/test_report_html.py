"""The page: one file that needs nothing else, safe against what hosts say, readable without colour and script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
import report_builders as r
import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import Excerpt, Finding, Fix, Gain
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import html
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine

NOW = "2031-05-06T07:08:09+00:00"
VOID = {"meta", "br", "hr", "img", "link", "input"}
# The tags that the template uses: anything else came from a host.
OWN_TAGS = set(
    re.findall(
        r"\w+",
        "html head meta title style body header main section footer h1 h2 h3 h4 p a b i u s em ul ol li dl dt dd div "
        "span code pre figure figcaption table thead tbody tr th td details summary svg path g rect text",
    )
)


class _Reader(HTMLParser):
    """Reads a page as a browser does: tags, attributes, text; complains about tags that do not match."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


def render(*hosts: Snapshot) -> str:
    fleet = {one.host: one for one in hosts}
    return html.render(fleet, engine.judge(fleet), NOW)


def poisoned(value: Any) -> Any:
    """Put hostile text behind every text of a snapshot or a finding, keys that code looks up left alone."""
    if isinstance(value, str):
        return value + r.HOSTILE
    if is_dataclass(value) and not isinstance(value, type):
        kept = {"state", "severity", "rule", "restart", "automation", "bdf", "parent", "class_code", "vendor", "driver"}
        return replace(
            value, **{one.name: poisoned(getattr(value, one.name)) for one in fields(value) if one.name not in kept}
        )
    if isinstance(value, tuple):
        return tuple(poisoned(one) for one in value)
    return value


def hostile_page() -> str:
    host = "bm" + r.HOSTILE
    snapshot = r.bare(host, extra=r.HOSTILE, unrecognised=(r.HOSTILE,), collected_at=r.HOSTILE)
    machine = b.Machine(
        sys_vendor=b.fact(r.HOSTILE), product_name=b.fact(r.HOSTILE), os_id=b.fact(r.HOSTILE), os_version=b.fact("1")
    )
    snapshot = replace(snapshot, machine=machine, p2p={"r": b.matrix("r", 8, "OK" + r.HOSTILE)})
    fix = Fix("do", ("step",), "reboot", "ask", "risk")
    finding = Finding(
        "D5",
        host,
        "fail",
        "title",
        "high",
        "subject",
        0,
        (Excerpt("s", "e"),),
        "why",
        "reason",
        Gain("1", "u", "s"),
        fix,
        "v",
        ("s",),
    )
    mild = [Finding("A1", host, state, "t", reason="r") for state in ("unknown", "info", "pass", "not_applicable")]
    other = r.bare("other" + r.HOSTILE)
    findings = {host: [poisoned(one) for one in (finding, *mild)], other.host: []}
    findings[host] = [replace(one, host=host) for one in findings[host]]
    return html.render({host: snapshot, other.host: other}, findings, NOW + r.HOSTILE)


def pages() -> Iterator[Any]:
    guest = b.guest(8, "llm1", p2p=b.granted(8, "NS"))
    node = b.hypervisor(b.vm_config(*b.TWO, cpu="host,hidden=1"), host="pve1")
    yield pytest.param(lambda: render(guest, node), id="guest and node")
    yield pytest.param(lambda: render(b.snapshot(None, "x")), id="nothing known")
    yield pytest.param(lambda: render(b.snapshot("bare_metal", "x", pci=b.pci())), id="no gpus")
    measured = r.bare(measurements={"p2p": (r.copied(8), r.verified(0, 1, True), r.verified(4, 5, False))})
    yield pytest.param(lambda: render(measured), id="measured")
    yield pytest.param(lambda: render(*(r.bare(f"bm{at}", 1 + at % 2) for at in range(12))), id="fleet")
    yield pytest.param(hostile_page, id="hostile")


@pytest.mark.parametrize("page", list(pages()))
def test_a_page_is_whole_and_needs_nothing_else(page) -> None:
    text = page()
    reader = read(text)

    assert {tag for tag, _ in reader.tags} <= OWN_TAGS
    for tag, attributes in reader.tags:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        assert not {"src", "srcset", "action", "style", "formaction", "xlink:href", "data"} & set(attributes)
        if "href" in attributes:
            assert re.fullmatch(r"#h\d+(-[A-Z]+\d+-\d+)?", attributes["href"] or ""), attributes
    assert "url(" not in text
    assert "@import" not in text
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    wanted = {(attributes["href"] or "")[1:] for _, attributes in reader.tags if attributes.get("href")}
    assert wanted <= set(ids)


@pytest.mark.parametrize("page", list(pages()))
def test_the_drawings_are_well_formed(page) -> None:
    for drawn in re.findall(r"<svg.*?</svg>", page(), re.DOTALL):
        ElementTree.fromstring(drawn)


def test_what_hosts_say_is_text_and_nothing_else() -> None:
    text = hostile_page()
    reader = read(text)

    assert "<script" not in text.lower()
    assert "<img" not in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert "49" not in "".join(re.findall(r"\{\{.{0,5}", text))
    said = "".join(reader.text)
    assert said.count("<script>alert(1)</script>") > 20
    assert "{{7*7}}" in said


def test_each_cell_says_its_code_and_its_rung_in_words() -> None:
    text = render(r.bare(measurements={"p2p": (r.copied(8), r.verified(0, 1, True), r.verified(4, 5, False))}))
    cells = re.findall(r'<td class="(\w+) r(\w)" title="([^"]*)">(.*?)</td>', text)

    assert len(cells) == 8 * 7
    assert all("<b>OK</b>" in inside for _, _, _, inside in cells)
    assert sum(">copied<" in inside for _, _, _, inside in cells) == 8 * 7 - 4
    assert sum(">delivered<" in inside for _, _, _, inside in cells) == 2
    assert sum(">wrong data<" in inside for _, _, _, inside in cells) == 2
    assert all("reads OK, writes OK" in title for _, _, title, _ in cells)


def test_a_finding_has_all_that_a_person_needs() -> None:
    node = b.hypervisor(b.vm_config(*b.TWO, cpu="host,hidden=1"), host="pve1")
    text = render(node)
    said = "".join(read(text).text)
    found = next(one for one in engine.judge({"pve1": node})["pve1"] if one.rule == "B1")

    for part in (
        found.title,
        found.why,
        found.fix.summary,
        found.fix.risk,
        found.verify,
        *found.fix.steps,
        *found.sources,
    ):
        assert part in said
    assert found.evidence[0].excerpt in said
    assert "stop and start of the VM" in said


def test_unknowns_are_listed_with_their_reasons() -> None:
    said = "".join(read(render(b.snapshot(None, "x"))).text)

    assert "nothing tells the role" in said
    assert "nothing could be judged" in said
    assert "nothing wrong" not in said


def test_drift_names_the_majority_and_the_outlier() -> None:
    hosts = [r.bare(f"bm{at}", driver=b.Driver(loaded_version=b.fact("580.1" if at else "570.1"))) for at in range(3)]
    said = " ".join("".join(read(render(*hosts)).text).split())

    assert "NVIDIA driver 580.1 2 hosts 570.1 bm0" in said


def test_in_a_large_fleet_hosts_without_trouble_are_folded() -> None:
    good = [r.bare(f"bm{at}") for at in range(6)]
    bad = b.guest(2, "bad", p2p=b.granted(2, "NS"))
    text = render(*good, bad)

    open_ones = re.findall(r'<details class="hostbody" open>\s*<summary><h2>(.*?)</h2>', text)
    assert "bad" in open_ones
    assert len(open_ones) < 7


def test_the_same_input_gives_the_same_page() -> None:
    assert render(r.bare("a"), r.bare("b")) == render(r.bare("b"), r.bare("a"))


def test_both_colour_schemes_define_every_colour_that_is_used() -> None:
    style = html._style()
    used = set(re.findall(r"var\((--[\w-]+)\)", style))
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]
    own_in_dark = {"--rink"}

    assert used <= set(re.findall(r"(--[\w-]+):", light))
    assert used - own_in_dark <= set(re.findall(r"(--[\w-]+):", dark))
