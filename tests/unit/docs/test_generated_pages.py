"""Pages that are generated are generated anew when their source changes."""

from __future__ import annotations

import html
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_no_generated_page_is_stale_missing_or_left_over():
    made = runpy.run_path(str(ROOT / "docs/generate.py"))

    pages = dict(made["pages"]())
    stale = [
        place.relative_to(ROOT).as_posix()
        for place, text in pages.items()
        if not place.is_file() or place.read_text(encoding="utf-8") != text
    ]
    assert not stale, f"stale: {', '.join(stale[:5])}; run: make docs"
    assert not made["left_over"](), "pages of rules that exist no more; run: make docs"


def test_every_rule_has_a_page_that_says_all_of_it_and_the_index_leads_there():
    made = runpy.run_path(str(ROOT / "docs/generate.py"))
    index = made["rule_index"]()

    for name, rule in made["RULES"].items():
        text = html.unescape(made["rule_page"](rule))
        assert f"]({name}.md)" in index
        said = (
            rule.title,
            rule.why,
            rule.severity,
            rule.risk,
            *rule.verify.splitlines(),
            *rule.looks_at,
            *rule.sources,
        )
        for part in said:
            assert part in text, f"{name} does not say {part!r}"
        assert rule_family(name) in made["FAMILIES"], f"{name} has no family in docs/generate.py"


def rule_family(name: str) -> str:
    return re.match("[A-Z]+", name)[0]


def test_every_link_of_the_docs_leads_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
