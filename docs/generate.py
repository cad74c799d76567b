"""Write the pages that come from the code: `make docs`. A test says when they are stale.

docs/rules/ has one page for each rule and an index; docs/audit-json.md describes the JSON of an audit from its schema.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import RUNGS, SEVERITIES
from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import audit_json
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules.engine import RULES, rule_order
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules.registry import ROLES, Rule

HERE = Path(__file__).resolve().parent
RULES_FOLDER = HERE / "rules"
JSON_PAGE = HERE / "audit-json.md"

FAMILIES: Mapping[str, str] = {
    "A": "what kind of machine this is",
    "B": "the configuration of a virtual machine",
    "C": "the hypervisor",
    "D": "cliques and paths between GPUs",
    "E": "bare metal",
    "F": "driver and GPUs",
    "G": "runtime and containers",
    "H": "the machine around the GPUs",
    "S": "serving engines and collectives",
}
RESTARTS: Mapping[str, str] = {
    "none": "at once",
    "service": "a restart of the service",
    "vm_stop_start": "a stop and start of the VM (a reboot from inside is not enough)",
    "reboot": "a reboot",
}
AUTOMATION: Mapping[str, str] = {"yes": "yes", "ask": "after asking", "never": "never, only by hand"}

INDEX_HEAD = """# Rules

Written by `make docs` from `plugins/plugin_utils/rules/`; `peerlane rules ID` prints the same. A rule judges only the
machines named; what could not be read is `unknown`, with the reason, and never a pass or a fail. The severity is that
of a failure; a warning is usually `low`.
"""

JSON_HEAD = """# The JSON of an audit

Written by `make docs` from `plugins/plugin_utils/report/audit.schema.json`, a JSON Schema (draft 2020-12) that programs
can validate with.

    peerlane audit --from docs/examples/eight-gpu-guest --format json

The same input gives the same bytes, except for `generated_at`. Within `peerlane.audit/1` keys are only added: read what
you know and ignore the rest. Units stand in the names (`memory_total_mib`, `power_limit_w`). A fact is
`{"value": ..., "source": ..., "excerpt": ..., "reason": ...}`: where `value` is null, `reason` says why.

    # what failed, by host
    jq -r '.hosts[].findings[] | select(.state == "fail") | "\\(.host) \\(.rule) \\(.title)"' audit.json
"""


def rule_page(rule: Rule) -> str:
    """Return the page of one rule."""
    rows = [
        f"# {rule.id} {rule.name}",
        f"{_prose(rule.title)}.",
        f"**Why it matters.** {_prose(rule.why)}",
        f"**What it looks at.** {', '.join(f'`{one}`' for one in rule.looks_at)}",
    ]
    facts = [
        ("for", ", ".join(role.replace("_", " ") for role in rule.roles)),
        ("severity when it fails", rule.severity),
        ("rung of the evidence ladder", f"{rule.rung}, {RUNGS[rule.rung]}" if rule.rung is not None else ""),
        ("a fix takes effect after", RESTARTS[rule.restart]),
        ("Peerlane applies it", AUTOMATION[rule.automation]),
        ("judged without knowing the machine's role", "yes" if rule.without_role else ""),
    ]
    rows.append("\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts if value)]))
    if rule.risk:
        rows.append(f"**Risk of the fix.** {_prose(rule.risk)}")
    if rule.verify:
        rows.append("**Verify.**\n\n" + textwrap.indent(rule.verify, "    "))
    if rule.gain is not None:
        rows.append(f"**Seen elsewhere.** {rule.gain.value} {rule.gain.unit} ({rule.gain.source})")
    rows.append(f"**Sources.** {', '.join(rule.sources)}")
    return "\n\n".join(rows) + "\n"


def _prose(text: str) -> str:
    """Return text in which nothing is taken for a tag."""
    return text.replace("<", "&lt;")


def rule_index() -> str:
    """Return the page that lists all rules by family."""
    parts = [INDEX_HEAD]
    for family in sorted({rule_order(name)[0] for name in RULES}):
        parts.append(f"\n## {family}: {FAMILIES.get(family, 'more')}\n\n")
        parts.append("| rule | looks whether | for | severity |\n|---|---|---|---|\n")
        for rule in RULES.values():
            if rule_order(rule.id)[0] == family:
                roles = "all" if set(rule.roles) == set(ROLES) else ", ".join(rule.roles).replace("_", " ")
                link = f"[{rule.id} {rule.name}]({rule.id}.md)"
                parts.append(f"| {link} | {_prose(rule.title)} | {roles} | {rule.severity} |\n")
    return "".join(parts)


def json_page() -> str:
    """Return the page that describes the JSON of an audit."""
    schema = audit_json.schema()
    rows = [JSON_HEAD, _table("The document", schema)]
    rows += [_table(f"`{name}`", part) for name, part in schema["$defs"].items()]
    rungs = ", ".join(f"{at} {name}" for at, name in enumerate(RUNGS))
    rows.append(f"Severities, the worst first: {', '.join(SEVERITIES)}. Rungs: {rungs}.\n")
    return "\n".join(rows)


def _table(title: str, schema: Mapping[str, Any]) -> str:
    rows = [f"## {title}\n", f"{schema['description']}\n"] if "description" in schema else [f"## {title}\n"]
    required = schema.get("required", ())
    rows += ["| key | type | meaning |", "|---|---|---|"]
    for name, part in schema.get("properties", {}).items():
        optional = "" if name in required else " (may be missing)"
        rows.append(f"| `{name}` | {_type(part)} | {part.get('description', '')}{optional} |")
    return "\n".join(rows) + "\n"


def _type(part: Mapping[str, Any]) -> str:
    if "$ref" in part:
        return f"`{part['$ref'].rpartition('/')[2]}`"
    if "const" in part:
        return f"`{json.dumps(part['const'])}`"
    if "enum" in part:
        return ", ".join("null" if one is None else f"`{one}`" for one in part["enum"])
    if "anyOf" in part:
        return " or ".join(_type(one) for one in part["anyOf"])
    kind = part.get("type", "any")
    if kind == "array":
        return f"list of {_type(part['items'])}" if "items" in part else "list"
    if kind == "object" and isinstance(part.get("additionalProperties"), Mapping):
        return f"mapping to {_type(part['additionalProperties'])}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def pages() -> Iterator[tuple[Path, str]]:
    """Yield every generated page: where it lies, and what stands in it."""
    yield RULES_FOLDER / "README.md", rule_index()
    for rule in RULES.values():
        yield RULES_FOLDER / f"{rule.id}.md", rule_page(rule)
    yield JSON_PAGE, json_page()


def left_over() -> list[Path]:
    """Return the pages of rules that exist no more."""
    wanted = {place for place, _ in pages()}
    return [place for place in sorted(RULES_FOLDER.glob("*.md")) if place not in wanted]


if __name__ == "__main__":
    RULES_FOLDER.mkdir(exist_ok=True)
    for place, text in pages():
        place.write_text(text, encoding="utf-8")
    for place in left_over():
        place.unlink()
