"""Markdown: what is pasted reads as it was meant, and what hosts say cannot become markup."""

from __future__ import annotations

import re

import pytest
import report_builders as r
import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import Excerpt, Finding, Fix
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import markdown
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine

NOW = "2031-05-06T07:08:09+00:00"


def render(*hosts: Snapshot) -> str:
    fleet = {one.host: one for one in hosts}
    return markdown.render(fleet, engine.judge(fleet), NOW)


def pair() -> tuple[Snapshot, Snapshot]:
    node = b.hypervisor(b.vm_config(*b.TWO, cpu="host,hidden=1"), host="pve1")
    return b.guest(2, "llm1", p2p=b.granted(2, "NS")), node


def outside_fences(text: str) -> str:
    kept, fence = [], ""
    for row in text.splitlines():
        mark = re.match("`{3,}", row)
        if fence:
            fence = "" if row == fence else fence
        elif mark:
            fence = mark[0]
        else:
            kept.append(row)
    assert not fence, "a fence was not closed"
    return "\n".join(kept)


def test_evidence_and_steps_stand_in_fences() -> None:
    text = render(*pair())

    assert "`pve.conf.101`\n\n```text\ncpu: host,hidden=1\n```" in text
    assert re.search(r"```sh\ncp -a .*\nqm set 101 --cpu 'host'\n", text)
    assert "**FAIL high B1** on `pve1`" in text
    assert text.startswith("## Peerlane audit: 2 hosts: ")


def test_the_rest_is_folded_and_every_fold_is_closed() -> None:
    text = render(*pair())

    assert text.count("<details>") == text.count("</details>") > 3
    assert "<summary>why, steps, risk, verify</summary>" in text
    assert re.search(r"<summary>\d+ unknown</summary>", text)


def test_an_excerpt_is_shown_once_and_cut() -> None:
    long = Excerpt("log", "\n".join(f"line {at} " + "x" * 500 for at in range(50)))
    ones = [Finding(f"F{at}", "x", "fail", "wrong", evidence=(long,)) for at in (1, 2)]
    text = markdown.render({"x": b.snapshot("bare_metal", "x")}, {"x": ones}, NOW)

    assert text.count("line 3 ") == 1
    assert "... and 40 more lines" in text
    assert max(len(row) for row in text.splitlines()) < 200


def test_the_table_of_paths_has_code_and_rung() -> None:
    text = render(r.bare(measurements={"p2p": (r.copied(8), r.verified(0, 1, True), r.verified(4, 5, False))}))

    assert re.search(r"GPU0  - +OK/2  OK/1 ", text)
    assert "WRONG OK/0" in text
    assert "/1 copied; /2 delivered" in text


def test_drift_is_a_table() -> None:
    hosts = [r.bare(f"bm{at}", driver=b.Driver(loaded_version=b.fact("580.1" if at else "570.1"))) for at in range(3)]

    assert "| NVIDIA driver | 580.1 (2 hosts) | 570.1 on bm0 |" in render(*hosts)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain words, 0000:01:00.0 (x)", "plain words, 0000:01:00.0 (x)"),
        ("<b>&", "&lt;b&gt;&amp;"),
        ("*a* _b_ `c` ~~d~~", r"\*a\* \_b\_ \`c\` \~\~d\~\~"),
        ("[a](b)", r"\[a\](b)"),
        ("a | b", r"a \| b"),
        ("see #12", r"see \#12"),
        ("ask @someone", "ask @\u200bsomeone"),
        ("at https://example.test/x", r"at https\://example.test/x"),
        ("two\nlines\x1b[2J", r"two lines?\[2J"),
    ],
)
def test_text_is_shown_as_it_is(raw: str, shown: str) -> None:
    assert markdown.text(raw) == shown


@pytest.mark.parametrize(
    ("raw", "shown"),
    [("- a", r"\- a"), ("1. a", r"1\. a"), ("12) a", r"12\) a"), ("=== a", r"\=== a"), ("a - b", "a - b")],
)
def test_a_line_never_starts_a_list_or_a_heading(raw: str, shown: str) -> None:
    assert markdown.paragraph(raw) == shown


@pytest.mark.parametrize("raw", ["x", "a ``` b", "````\nrm -rf /\n````", "`````"])
def test_nothing_inside_closes_a_fence(raw: str) -> None:
    made = markdown.fence(raw)
    first, *inside, last = made.splitlines()

    assert first == last + "text"
    assert not any(row.startswith(last) for row in inside)


@pytest.mark.parametrize(("raw", "shown"), [("a", "`a`"), ("a`b", "``a`b``"), ("`a`", "`` `a` ``"), ("", "")])
def test_code_spans_hold_backquotes(raw: str, shown: str) -> None:
    assert markdown.code(raw) == shown


def test_hostile_text_stays_text() -> None:
    fix = Fix("do" + r.HOSTILE, ("step" + r.HOSTILE,), risk=r.HOSTILE)
    excerpt = Excerpt("s" + r.HOSTILE, r.HOSTILE)
    bad = Finding("D5", "x", "fail", r.HOSTILE, "high", evidence=(excerpt,), why=r.HOSTILE, fix=fix, verify=r.HOSTILE)
    mild = Finding("A1", "x", "unknown", r.HOSTILE, reason=r.HOSTILE)
    snapshot = b.snapshot("bare_metal", "x", unrecognised=(r.HOSTILE,))
    text = markdown.render({"x": snapshot}, {"x": [bad, mild]}, NOW)
    prose = re.sub(r"(`+).*?\1", "", outside_fences(text))

    assert "<script" not in prose
    assert "<img" not in prose
    assert set(re.findall(r"</?\w+", prose)) <= {"<details", "</details", "<summary", "</summary", "<sub", "</sub"}
    assert "\x1b" not in text
    assert "\u202e" not in text
