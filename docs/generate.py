"""Write docs/rules.md from the rules themselves: `make docs`. A test says when it is stale."""

from __future__ import annotations

from pathlib import Path

from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules.engine import RULES

PLACE = Path(__file__).resolve().parent / "rules.md"

HEAD = """# Rules

Written by `make docs` from `plugins/plugin_utils/rules/`; `peerlane rules ID` prints the same with the risk of the fix.
A rule judges only the roles named; what could not be read is `unknown`, with the reason, and never a pass or a fail.

"""


def page() -> str:
    """Return the whole page."""
    rows = [HEAD]
    for rule in RULES.values():
        roles = ", ".join(role.replace("_", " ") for role in rule.roles)
        rows.append(f"## {rule.id} {rule.name}\n\n{rule.title}.\n\n")
        rows.append(f"- for: {roles}; severity when it fails: {rule.severity}\n")
        rows.append(f"- looks at: {', '.join(f'`{one}`' for one in rule.looks_at)}\n")
        rows.append(f"- why: {rule.why}\n")
        if rule.gain is not None:
            rows.append(f"- seen elsewhere: {rule.gain.value} {rule.gain.unit} ({rule.gain.source})\n")
        rows.append(f"- a fix takes effect after: {rule.restart.replace('_', ' ')}; by Peerlane: {rule.automation}\n")
        if rule.verify:
            rows.append(f"- verify: `{rule.verify}`\n")
        rows.append(f"- sources: {', '.join(rule.sources)}\n\n")
    return "".join(rows).rstrip() + "\n"


if __name__ == "__main__":
    PLACE.write_text(page(), encoding="utf-8")
