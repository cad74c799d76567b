"""Tests that start real lab hosts. They need root and Linux namespaces, and say so where these are missing."""

from __future__ import annotations

import os
import shutil

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "lab: starts lab hosts; needs root, systemd-nspawn and namespaces")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = ""
    if os.geteuid() != 0:
        reason = "lab hosts need root"
    elif missing := [name for name in ("systemd-nspawn", "mmdebstrap", "iptables") if shutil.which(name) is None]:
        reason = f"lab hosts need {', '.join(missing)}"
    for item in items:
        if reason and item.get_closest_marker("lab"):
            item.add_marker(pytest.mark.skip(reason=reason))
