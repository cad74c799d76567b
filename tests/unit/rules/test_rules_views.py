"""A view of a snapshot is made once, for that snapshot and those arguments."""

from __future__ import annotations

from dataclasses import replace

import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import machines
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules.views import view


def test_a_view_is_made_once_for_a_snapshot_and_an_argument() -> None:
    made = []

    @view
    def named(snapshot: Snapshot, word: object) -> str:
        made.append((snapshot.host, word))
        return f"{snapshot.host} {word}"

    one, two = b.guest(2, "one"), b.guest(2, "two")
    words = ["a"], ["b"]
    assert [named(host, word) for host in (one, two, one, two) for word in words] == 2 * [
        f"{host} {word}" for host in ("one", "two") for word in words
    ]
    assert len(made) == 4


def test_a_changed_snapshot_has_views_of_its_own() -> None:
    node = b.hypervisor(b.vm_config(*b.TWO), host="pve1")
    assert len(machines.gpu_vms(node)) == 1
    bare = replace(node, vm=replace(node.vm, configs=replace(node.vm.configs, value={})))
    assert machines.gpu_vms(bare) == ()
    assert len(machines.gpu_vms(node)) == 1
    assert bare != node == replace(node)
