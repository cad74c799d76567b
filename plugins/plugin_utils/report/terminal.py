"""The audit as text for a terminal: the cause first, one screen, more with ``verbose``."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from ..core.finding import RUNGS, Finding
from ..rules.drift import Aspect, Drift, Share
from ..rules.registry import Fleet
from .story import (
    RESTARTS,
    STATE_WORDS,
    Cause,
    HostStory,
    Story,
    clean,
    label,
    missing_sources,
    paths_text,
    reasons_of,
    rung_text,
    tell,
    total_text,
)

_COLORS = {"fail": "31", "warn": "33", "unknown": "36", "info": "34", "pass": "32", "not_applicable": "2", "head": "1"}
_MIN_WIDTH = 40
# Without -v. A screen of the terminals that servers are looked at with has about 40 lines.
_SCREEN_LINES = 40
_FRAME_LINES = 14  # heads, counts, total
_FEWEST_LINES = 8
_MOST_BLOCKS = 4  # hosts that are told one by one; more get a line each
_MOST_EFFECTS = 6
_MOST_CAUSES = 12
_MOST_ROWS = 3
_MOST_DIFFERENCES = 8
_MOST_STEPS = 6  # of the first cause; a longer fix needs -v
_NAME_WIDTH = 24
_COLUMNS = ("host", "machine", "failed", "warn", "unknown", "first", "P2P", "GPUs")


class _Page:
    """Lines that are at most ``width`` wide, except commands, which stay whole so that they can be copied."""

    def __init__(self, width: int, color: bool) -> None:
        self.width = max(width, _MIN_WIDTH)
        self.color = color
        self.lines: list[str] = []

    def paint(self, text: str, kind: str) -> str:
        """Return text in the colour of a kind."""
        return f"\x1b[{_COLORS[kind]}m{text}\x1b[0m" if self.color else text

    def text(self, text: str, lead: str = "", hang: int | None = None, kind: str = "", first: str = "") -> None:
        """Add wrapped text. ``first`` is the part of the first line, at its start, that is painted."""
        indent = " " * (len(lead) if hang is None else hang)
        rows = textwrap.wrap(
            first + clean(text), self.width, initial_indent=lead, subsequent_indent=indent, break_on_hyphens=False
        )
        if kind and first and rows:
            rows[0] = rows[0].replace(first.rstrip(), self.paint(first.rstrip(), kind), 1)
        elif kind:
            rows = [self.paint(row, kind) for row in rows]
        self.lines += rows or [""]

    def cut(self, text: str, lead: str = "", kind: str = "", first: str = "") -> None:
        """Add one line, cut with ``...`` where it is too long."""
        row = lead + first + clean(text)
        row = row if len(row) <= self.width else row[: self.width - 3].rstrip() + "..."
        self.lines.append(row.replace(first.rstrip(), self.paint(first.rstrip(), kind), 1) if kind and first else row)

    def command(self, step: str, lead: str) -> None:
        """Add a command to copy: never broken. A remark is wrapped as text."""
        step = clean(step)
        if step.startswith("#") and not step.startswith("# way back:"):
            rows = textwrap.wrap(step[1:].strip(), self.width - len(lead) - 2, break_on_hyphens=False)
            self.lines += [f"{lead}# {row}" for row in rows]
        else:
            self.lines.append(lead + step)

    def gap(self) -> None:
        """Add one empty line, never two."""
        if self.lines and self.lines[-1]:
            self.lines.append("")


def render(
    fleet: Fleet,
    findings: Mapping[str, Sequence[Finding]],
    verbose: bool = False,
    color: bool = False,
    width: int = 100,
) -> str:
    """Return the audit as text. ``width``: columns that no line exceeds, except a command to copy."""
    page = _Page(width, color)
    story = tell(fleet, findings)
    if verbose:
        for host in story.hosts:
            _whole_host(page, host)
    elif len(story.hosts) <= _MOST_BLOCKS:
        room = max((_SCREEN_LINES - _FRAME_LINES) // max(len(story.hosts), 1), _FEWEST_LINES)
        for host in story.hosts:
            _short_host(page, host, room)
    else:
        _fleet(page, story)
    _drift(page, story.drift, verbose)
    page.gap()
    page.text(total_text(story))
    return "\n".join(page.lines) + "\n"


# --- one host -------------------------------------------------------------------------------------------------------


def _head(page: _Page, host: HostStory) -> None:
    page.gap()
    how = f" ({host.role_source})" if host.role_source else ""
    page.text(host.role + how, first=f"{clean(host.host)}  ", kind="head", hang=2)
    page.text(host.gpus, lead="  GPUs    ")
    if host.driver:
        page.text(host.driver, lead="  driver  ")
    if host.paths is not None:
        page.text(paths_text(host.paths), lead="  P2P     ")


def _short_host(page: _Page, host: HostStory, room: int) -> None:
    """Add one host in about ``room`` lines of findings: the worst in full, the next in a line, the rest counted."""
    _head(page, host)
    left = list(host.causes)
    blocks = [_block(page, cause, steps=at == 0) for at, cause in enumerate(left)]
    used = 0
    while left and used + len(blocks[0]) + len(left) - 1 <= max(room, len(blocks[0]) + 1):
        page.gap()
        block = blocks.pop(0)
        left.pop(0)
        page.lines += block
        used += len(block) + 1
    if left:
        page.gap()
        lines = max(room - used, _MOST_ROWS)
        shown = left if len(left) <= lines else left[: lines - 1]
        for cause in shown:
            more = f" (explains {len(cause.effects)} more)" if cause.effects else ""
            one = cause.finding
            page.cut(one.title + more, lead="  ", first=f"{label(one)}  ", kind=one.state)
        if len(shown) < len(left):
            page.text(f"and {len(left) - len(shown)} more findings: -v shows them", lead="  ")
    for one, rules in host.elsewhere:
        page.gap()
        where = f"{clean(one.host)}: {one.rule} {one.title}"
        page.text(f"{', '.join(rules)} of this host: the cause is on {where}", lead="  ", hang=6)
    _unknown(page, host)
    _counts(page, host)
    for name in host.snapshot.unrecognised[:_MOST_ROWS]:
        page.text(name, lead="  not recognised: ", hang=4)
    if len(host.snapshot.unrecognised) > _MOST_ROWS:
        page.text(f"and {len(host.snapshot.unrecognised) - _MOST_ROWS} more", lead="  not recognised: ")


def _block(page: _Page, cause: Cause, steps: bool) -> list[str]:
    """Return the lines of one cause: what it is, the line that says so, the fix, and what it explains."""
    part = _Page(page.width, page.color)
    one = cause.finding
    part.text(one.title + rung_text(one), lead="  ", hang=6, first=f"{label(one)}  ", kind=one.state)
    said = next((piece for piece in one.evidence if piece.excerpt.strip()), None)
    if said is not None:
        part.cut(said.excerpt.strip().splitlines()[0].strip(), lead=f"      {clean(said.source)}: ")
    if one.fix is not None:
        restart = f" ({RESTARTS[one.fix.restart]})" if one.fix.restart != "none" else ""
        part.text(one.fix.summary + restart, lead="      fix: ", hang=11)
        if steps and len(one.fix.steps) <= _MOST_STEPS:
            for step in one.fix.steps:
                part.command(step, "        ")
    most = _MOST_EFFECTS if len(cause.effects) > _MOST_EFFECTS + 1 else len(cause.effects)
    for effect in cause.effects[:most]:
        two = effect.finding
        where = f"{clean(two.host)}: " if two.host != one.host else ""
        lead = " " * (4 + 2 * effect.depth) + "-> "
        part.cut(f"{where}{two.title}", lead=lead, first=f"{label(two)}  ", kind=two.state)
    if most < len(cause.effects):
        part.text(f"and {len(cause.effects) - most} more", lead="      -> ")
    return part.lines


def _unknown(page: _Page, host: HostStory) -> None:
    """Add what is unknown by its reason: what to collect to know more."""
    unknown = host.of("unknown")
    if not unknown:
        return
    page.gap()
    missing, others = missing_sources(unknown)
    rows = [
        f"{', '.join(rules[:_MOST_EFFECTS])}{' ...' if len(rules) > _MOST_EFFECTS else ''}: {reason}"
        for reason, rules in reasons_of(others)
    ]
    if missing:
        lacking = (
            f"{len(unknown) - len(others)} rules lack" if len(unknown) > len(others) + 1 else f"{missing[0][1]} lacks"
        )
        rows.insert(0, f"{lacking} {', '.join(source for source, _ in missing)}")
    shown = rows if len(rows) <= _MOST_ROWS else rows[: _MOST_ROWS - 1]
    first = f"  {len(unknown)} unknown: "
    for at, row in enumerate(shown):
        page.cut(row, lead=first if at == 0 else " " * len(first))
    if len(shown) < len(rows):
        page.text(f"and {len(rows) - len(shown)} other reasons: -v shows them", lead=" " * len(first))


def _counts(page: _Page, host: HostStory) -> None:
    counts = host.counts()
    words = [
        f"{counts[state]} {'not applicable' if state == 'not_applicable' else state}"
        for state in ("pass", "info", "not_applicable")
        if counts[state]
    ]
    if words:
        if not counts["unknown"]:
            page.gap()
        lead = "  also: " if host.bad or counts["unknown"] else "  "
        page.text(f"{', '.join(words)}; -v shows them", lead=lead)


# --- one host, all of it --------------------------------------------------------------------------------------------


def _whole_host(page: _Page, host: HostStory) -> None:
    _head(page, host)
    for one in host.bad:
        page.gap()
        _full(page, one, host.reasons.get(one.rule, ()))
    _mild(page, host)
    for name in host.snapshot.unrecognised:
        page.text(name, lead="  not recognised: ", hang=4)


def _full(page: _Page, one: Finding, reasons: Sequence[Finding]) -> None:
    subject = f" [{one.subject}]" if one.subject else ""
    page.text(one.title + rung_text(one) + subject, lead="  ", hang=6, first=f"{label(one)}  ", kind=one.state)
    for cause in reasons:
        page.text(f"{cause.rule} on {cause.host}: {cause.title}", lead="      cause:    ")
    if one.reason:
        page.text(one.reason, lead="      reason:   ")
    for piece in one.evidence:
        page.cut(piece.source, lead="      evidence: ")
        for row in piece.excerpt.splitlines()[:8]:
            page.cut(row, lead="        | ")
    if one.why:
        page.text(one.why, lead="      why:      ")
    if one.expected_gain is not None:
        gain = one.expected_gain
        page.text(f"{gain.value} {gain.unit} ({gain.source})", lead="      seen:     ")
    if one.fix is not None:
        page.text(f"{one.fix.summary} ({RESTARTS[one.fix.restart]})", lead="      fix:      ")
        for step in one.fix.steps:
            page.command(step, "        ")
        if one.fix.risk:
            page.text(one.fix.risk, lead="      risk:     ")
    if one.verify:
        page.lines.append("      verify:")
        page.command(one.verify, "        ")


def _mild(page: _Page, host: HostStory) -> None:
    page.gap()
    for one in host.findings:
        if one.bad or one.state == "not_applicable":
            continue
        why = f" ({one.reason})" if one.reason else ""
        first = f"{STATE_WORDS.get(one.state, one.state)} {one.rule}  "
        page.text(f"{one.title}{why}", lead="  ", hang=6, first=first, kind=one.state)
    for reason, rules in reasons_of(host.of("not_applicable")):
        first = f"{STATE_WORDS['not_applicable']}  "
        page.text(f"{reason}: {', '.join(rules)}", lead="  ", hang=6, first=first, kind="not_applicable")


# --- a fleet --------------------------------------------------------------------------------------------------------


def _fleet(page: _Page, story: Story) -> None:
    """Add the causes of all hosts, equal ones together, and one line for each host."""
    shown = story.alike[:_MOST_CAUSES]
    for causes in shown:
        one = causes[0].finding
        hosts = list(dict.fromkeys(cause.finding.host for cause in causes))
        effects = sum(len(cause.effects) for cause in causes)
        more = f" (explains {effects} more)" if effects else ""
        page.cut(f"{clean(hosts[0])}: {one.title}{more}", first=f"{label(one)}  ", kind=one.state)
        if len(hosts) > 1:
            page.cut(f"and on {_hosts(hosts[1:])}", lead="    ")
        if one.fix is not None:
            page.cut(f"{one.fix.summary} ({RESTARTS[one.fix.restart]})", lead="    fix: ")
    if len(shown) < len(story.alike):
        page.text(f"and {len(story.alike) - len(shown)} more causes: -v shows them")
    page.gap()
    rows = [_COLUMNS, *(_row(host) for host in sorted(story.hosts, key=lambda one: (one.worst, one.host)))]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS))]
    for at, row in enumerate(rows):
        name, *cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        page.cut("  ".join(cells).rstrip(), first=f"{name}  ", kind="head" if at else "")


def _row(host: HostStory) -> tuple[str, ...]:
    counts = host.counts()
    paths = host.paths
    rung = f" [{RUNGS[paths.rung]}]" if paths is not None and paths.rung is not None else ""
    return (
        _narrow(clean(host.host), _NAME_WIDTH),
        host.role.partition(":")[0],
        str(counts["fail"]),
        str(counts["warn"]),
        str(counts["unknown"]),
        host.causes[0].finding.rule if host.causes else host.elsewhere[0][0].rule if host.elsewhere else "",
        f"{paths.state}{rung}" if paths is not None else "",
        clean(host.gpus),
    )


def _narrow(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."


def _drift(page: _Page, drift: Drift, verbose: bool) -> None:
    for group in drift.groups:
        shown = group.differences if verbose else group.differences[:_MOST_DIFFERENCES]
        if not shown and not verbose:
            continue
        page.gap()
        role = group.role.replace("_", " ")
        page.text(f"{len(group.hosts)} hosts of one kind ({role}, {group.gpu_model})", first="drift  ", kind="head")
        for one in shown:
            page.text(_difference(one), lead="  ", hang=6)
        if len(shown) < len(group.differences):
            page.text(f"and {len(group.differences) - len(shown)} more differences: -v shows them", lead="  ")
        if not group.differences:
            page.text("no difference in what could be read", lead="  ")
        if verbose and group.same:
            page.text(", ".join(group.same), lead="  the same: ", hang=6)
        if verbose:
            for one in group.unknown:
                for unread in one.unknown:
                    page.text(f"{one.title} on {_hosts(unread.hosts)}: {unread.reason}", lead="  unknown: ", hang=6)
        elif group.unknown:
            page.text(", ".join(one.title for one in group.unknown), lead="  unknown on some hosts: ", hang=6)
    if verbose:
        for unread in drift.not_compared:
            page.gap()
            page.text(f"{_hosts(unread.hosts)}: {unread.reason}", lead="not compared: ", hang=4)


def _difference(one: Aspect) -> str:
    shares = [*([one.majority] if one.majority else []), *one.others]
    return f"{one.title}: " + "; ".join(_share(share, share is one.majority) for share in shares)


def _share(share: Share, most: bool) -> str:
    return f"{share.value} on {len(share.hosts)} hosts" if most else f"{share.value} on {_hosts(share.hosts)}"


def _hosts(names: Sequence[str]) -> str:
    named = ", ".join(clean(name) for name in names[:_MOST_EFFECTS])
    return f"{named} and {len(names) - _MOST_EFFECTS} more" if len(names) > _MOST_EFFECTS else named
