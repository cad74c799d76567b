"""Fixtures of the parser tests. The recorded texts are made by hand in the tools' own format, with neutral values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.evidence import Evidence, EvidenceSet
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import snapshot

FIXTURES = Path(__file__).parents[2] / "fixtures" / "parse"


@pytest.fixture
def recorded() -> Callable[[str], str]:
    """Return a function that reads a recorded text by its file name."""
    return lambda name: (FIXTURES / name).read_text(encoding="utf-8")


@pytest.fixture
def built() -> Callable[..., Snapshot]:
    """Return a function that builds the snapshot of texts (or whole entries) by source."""

    def build(texts: dict[str, str | Evidence], host: str = "node1") -> Snapshot:
        entries = {
            source: given if isinstance(given, Evidence) else Evidence(source, stdout=given)
            for source, given in texts.items()
        }
        return snapshot.build(EvidenceSet(host=host, entries=entries))

    return build
