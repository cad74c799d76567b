"""The audit as one HTML page that needs nothing else: no script, no font, no picture from anywhere.

Everything that a host said is hostile text: the template escapes all of it, ``clean`` takes control characters and
marks that turn the direction of text out of it, and the page forbids itself to load or run anything.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from ..core.finding import RUNGS, SEVERITIES, Finding
from ..rules.registry import Fleet
from .drawing import draw
from .paths import table
from .story import (
    RESTARTS,
    RUNG_MEANINGS,
    STATE_WORDS,
    HostStory,
    clean,
    paths_text,
    quiet_text,
    reasons_of,
    tell,
    total_text,
)

_HERE = Path(__file__).resolve().parent
# Hosts that are all shown open; in a larger fleet those without trouble are folded.
_ALL_OPEN = 4


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        # Every value passes here, so that nothing can be forgotten. Markup is not text any more and stays as it is.
        finalize=lambda value: clean(value) if type(value) is str else value,
    )
    return environment.get_template("audit.html.j2")


def render(fleet: Fleet, findings: Mapping[str, Sequence[Finding]], generated_at: str) -> str:
    """Return the page. ``generated_at``: ISO 8601 in UTC, given by the caller. The same input gives the same page."""
    story = tell(fleet, findings)
    counts = story.counts()
    ids: dict[int, str] = {}
    for number, host in enumerate(story.hosts):
        for at, one in enumerate(host.findings):
            ids[id(one)] = f"h{number}-{one.rule}-{at}"
    bad = [one for host in story.hosts for one in host.bad]
    return _template().render(
        story=story,
        total=total_text(story),
        counts=counts,
        severities={name: sum(one.severity == name for one in bad) for name in SEVERITIES},
        generated_at=generated_at,
        anchors={host.host: f"h{at}" for at, host in enumerate(story.hosts)},
        id_of=lambda one: ids[id(one)],
        is_open=lambda host: len(story.hosts) <= _ALL_OPEN or bool(host.bad),
        draw=lambda host: draw(host.snapshot),
        table=lambda host: None if host.snapshot.role.value == "hypervisor" else table(host.snapshot),
        extra=_extra,
        paths_text=paths_text,
        quiet_text=quiet_text,
        reasons_of=reasons_of,
        restarts=RESTARTS,
        rungs=RUNGS,
        rung_meanings=RUNG_MEANINGS,
        state_words=STATE_WORDS,
        css=_style(),
    )


@functools.cache
def _style() -> str:
    return (_HERE / "audit.css").read_text(encoding="utf-8")


def _extra(host: HostStory) -> list[tuple[str, str]]:
    """Return what else identifies a host, as far as it was read: (label, value)."""
    snapshot = host.snapshot
    machine, kernel = snapshot.machine, snapshot.kernel
    system = " ".join(part for part in (machine.os_id.value, machine.os_version.value) if part)
    rows = [
        ("role not known", host.role.partition(": ")[2]),
        ("machine", " ".join(part for part in (machine.sys_vendor.value, machine.product_name.value) if part)),
        ("CPU", snapshot.cpu.model_name.value or ""),
        ("system", system),
        ("kernel", kernel.release.value or ""),
        ("Proxmox VE", snapshot.vm.pve_version.value or ""),
        ("collected", snapshot.collected_at),
        ("as root", {True: "yes", False: "no: what needs root is unknown"}.get(snapshot.privileged, "")),  # type: ignore[arg-type]
    ]
    return [(label, value) for label, value in rows if value]
