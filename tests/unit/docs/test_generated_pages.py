"""Pages that are generated are generated anew when their source changes."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_of_the_rules_is_not_stale():
    made = runpy.run_path(str(ROOT / "docs/generate.py"))["page"]()

    assert (ROOT / "docs/rules.md").read_text(encoding="utf-8") == made, "run: make docs"


def test_every_link_of_the_docs_leads_somewhere():
    import re

    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
