"""The audit as Markdown, to paste into a forum or an issue: short, evidence in fences, the rest folded.

Text from hosts is input: outside fences every character that Markdown or HTML gives a meaning is escaped, a fence is
longer than any run of backquotes inside it, and nobody is mentioned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ..core.finding import RUNGS, Excerpt, Finding
from ..rules.registry import Fleet
from .paths import Table, table
from .story import RESTARTS, STATE_WORDS, Cause, HostStory, Story, clean, paths_text, reasons_of, tell, total_text

_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~$&])")
_LINE_START = re.compile(r"^([-+=]|\d+(?=[.)]))")
_MOST_EXCERPT_LINES = 10
_MOST_COLUMNS = 120
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


def render(fleet: Fleet, findings: Mapping[str, Sequence[Finding]], generated_at: str) -> str:
    """Return the audit. ``generated_at``: ISO 8601 in UTC, given by the caller."""
    story = tell(fleet, findings)
    parts = [f"## Peerlane audit: {total_text(story)}", *_causes(story)]
    for host in story.hosts:
        parts += _host(host)
    parts += _drift(story)
    parts.append(f"<sub>Peerlane, {text(generated_at)}. Unknown is neither good nor bad.</sub>")
    return "\n\n".join(parts) + "\n"


def text(raw: str) -> str:
    """Return text that Markdown shows as it is, on one line."""
    line = " ".join(clean(raw).split())
    escaped = _SPECIAL.sub(lambda hit: _ENTITIES.get(hit[1], "\\" + hit[1]), line)
    # A zero-width space: @name stays a word and calls nobody; #12 is escaped above, and an address is no link.
    return escaped.replace("@", "@\u200b").replace("://", "\\://")


def paragraph(raw: str) -> str:
    """Return text that starts a line, so that it becomes neither a list nor a heading."""
    return _LINE_START.sub(lambda hit: hit[1] + "\\" if hit[1].isdigit() else "\\" + hit[1], text(raw))


def code(raw: str) -> str:
    """Return text as a code span."""
    line = " ".join(clean(raw).split())
    ticks = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{pad}{line}{pad}{ticks}" if line else ""


def fence(raw: str, language: str = "text") -> str:
    """Return text in a fence that nothing inside can close."""
    body = clean(raw).rstrip("\n")
    ticks = "`" * max(3, max((len(run) for run in re.findall("`+", body)), default=0) + 1)
    return f"{ticks}{language}\n{body}\n{ticks}"


def _fold(summary: str, *parts: str) -> str:
    """Return parts that are folded: forums and issue trackers show the summary and open the rest on a click."""
    return "\n\n".join([f"<details><summary>{summary}</summary>", *parts, "</details>"])


def _causes(story: Story) -> list[str]:
    if len(story.hosts) < 2 or not story.alike:
        return []
    rows = ["Causes, the worst first:", ""]
    for causes in story.alike[:12]:
        one = causes[0].finding
        hosts = list(dict.fromkeys(cause.finding.host for cause in causes))
        effects = sum(len(cause.effects) for cause in causes)
        more = f" (explains {effects} more)" if effects else ""
        rows.append(f"- **{_label(one)}** on {_hosts(hosts)}: {text(one.title)}{more}")
    if len(story.alike) > 12:
        rows.append(f"- and {len(story.alike) - 12} more, below")
    return ["\n".join(rows)]


def _hosts(names: Sequence[str], most: int = 6) -> str:
    named = ", ".join(code(name) for name in names[:most])
    return named + (f" and {len(names) - most} more" if len(names) > most else "")


def _label(one: Finding) -> str:
    return f"{STATE_WORDS.get(one.state, one.state).upper()} {one.severity} {one.rule}"


def _host(host: HostStory) -> list[str]:
    snapshot = host.snapshot
    facts = [("machine", host.role), ("GPUs", host.gpus), ("driver", host.driver)]
    facts.append(("paths between GPUs", paths_text(host.paths) if host.paths else ""))
    facts.append(("kernel", snapshot.kernel.release.value or ""))
    parts = [
        f"### {text(host.host)}",
        "\n".join(f"- {label}: {text(value)}" for label, value in facts if value),
    ]
    shown: set[Excerpt] = set()
    for cause in host.causes:
        parts += _cause(cause, shown)
    if host.elsewhere:
        parts.append(
            "\n".join(
                f"- {', '.join(rules)} of this host: the cause is {one.rule} on {code(one.host)}: {text(one.title)}"
                for one, rules in host.elsewhere
            )
        )
    below = [part for one in host.below for part in (f"**{_label(one)}** {text(one.title)}", *_evidence(one, shown))]
    if below:
        parts.append(_fold("evidence of what these causes explain", *below))
    paths = None if snapshot.role.value == "hypervisor" else table(snapshot)
    if paths is not None:
        parts.append(_fold("paths between GPUs", fence(_matrix(paths)), *(paragraph(note) for note in paths.notes)))
    parts += _others(host)
    if snapshot.unrecognised:
        rows = "\n".join(f"- {text(name)}" for name in snapshot.unrecognised)
        parts.append(_fold(f"{len(snapshot.unrecognised)} not recognised", rows))
    return parts


def _cause(cause: Cause, shown: set[Excerpt]) -> list[str]:
    one = cause.finding
    rung = f" [{RUNGS[one.rung]}]" if one.rung is not None else ""
    parts = [f"**{_label(one)}** {text(one.title)}{rung}", *_evidence(one, shown)]
    if cause.effects:
        rows = []
        for effect in cause.effects:
            two = effect.finding
            where = f"{code(two.host)}: " if two.host != one.host else ""
            rows.append(f"{'  ' * (effect.depth - 1)}- explains {_label(two)}: {where}{text(two.title)}")
        parts.append("\n".join(rows))
    folded = [paragraph(one.why)] if one.why else []
    if one.expected_gain is not None:
        gain = one.expected_gain
        folded.append(f"Seen elsewhere: {text(f'{gain.value} {gain.unit} ({gain.source})')}")
    if one.fix is not None:
        parts.append(f"Fix: {text(one.fix.summary)} ({RESTARTS[one.fix.restart]})")
        folded += [fence("\n".join(one.fix.steps), "sh")] if one.fix.steps else []
        folded += [f"Risk: {text(one.fix.risk)}"] if one.fix.risk else []
    if one.verify:
        folded += ["Verify:", fence(one.verify, "sh")]
    if one.sources:
        folded.append(f"Sources: {text(', '.join(one.sources))}")
    if folded:
        parts.append(_fold("why, steps, risk, verify" if one.fix is not None else "why", *folded))
    return parts


def _evidence(one: Finding, shown: set[Excerpt]) -> list[str]:
    """Return the evidence of a finding that was not shown before."""
    parts = []
    for piece in one.evidence:
        rows = piece.excerpt.strip("\n").splitlines()
        if not rows or piece in shown:
            continue
        shown.add(piece)
        left = len(rows) - _MOST_EXCERPT_LINES
        kept = [row if len(row) <= _MOST_COLUMNS else f"{row[:_MOST_COLUMNS]}..." for row in rows[:_MOST_EXCERPT_LINES]]
        kept += [f"... and {left} more lines"] if left > 0 else []
        parts += [code(piece.source)] if piece.source else []
        parts.append(fence("\n".join(kept)))
    return parts


def _matrix(paths: Table) -> str:
    """Return the table as text: code and rung of each cell."""
    rows = [["", *paths.gpus]]
    for gpu, cells in zip(paths.gpus, paths.rows, strict=True):
        rows.append([gpu, *("-" if one.state == "self" else _cell(one.code, one.rung, one.state) for one in cells)])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    drawn = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    seen = sorted({one.rung for one in paths.cells if one.rung is not None})
    legend = [f"{code} {meaning}" for code, meaning in paths.codes.items()]
    return "\n".join([*drawn, "", "; ".join([*legend, *(f"/{rung} {RUNGS[rung]}" for rung in seen)])])


def _cell(told: str, rung: int | None, state: str) -> str:
    return ("WRONG " if state == "wrong" else "") + (told if rung is None else f"{told}/{rung}")


def _others(host: HostStory) -> list[str]:
    counts = host.counts()
    unknown = [f"- {', '.join(rules)}: {text(reason)}" for reason, rules in reasons_of(host.of("unknown"))]
    parts = [_fold(f"{counts['unknown']} unknown", "\n".join(unknown))] if unknown else []
    words = [f"{counts['pass']} passed"] if counts["pass"] else []
    words += [f"{counts['info']} for information"] if counts["info"] else []
    words += [f"{counts['not_applicable']} not applicable"] if counts["not_applicable"] else []
    return [*parts, f"Also: {', '.join(words)}."] if words else parts


def _drift(story: Story) -> list[str]:
    parts: list[str] = []
    for group in story.drift.groups:
        kind = f"{group.role.replace('_', ' ')}, {group.gpu_model}"
        parts.append(f"### Drift: {len(group.hosts)} hosts ({text(kind)})")
        if group.differences:
            rows = ["| what | most hosts | others |", "|---|---|---|"]
            for one in group.differences:
                most = (
                    f"{_cells([one.majority.value])} ({len(one.majority.hosts)} hosts)"
                    if one.majority
                    else "no majority"
                )
                others = "; ".join(f"{_cells([share.value])} on {_cells(share.hosts)}" for share in one.others)
                rows.append(f"| {text(one.title)} | {most} | {others} |")
            parts.append("\n".join(rows))
        else:
            parts.append("No difference in what could be read.")
        unknown = [
            f"- {text(one.title)} on {_hosts(unread.hosts)}: {text(unread.reason)}"
            for one in group.unknown
            for unread in one.unknown
        ]
        if unknown:
            parts.append(_fold(f"{len(group.unknown)} not known on some hosts", "\n".join(unknown)))
    return parts


def _cells(values: Iterable[str]) -> str:
    # A bar ends a cell of a table, even in a code span.
    return ", ".join(text(value) for value in values)
