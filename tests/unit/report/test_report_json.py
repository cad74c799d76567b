"""The audit as JSON, and the facts that tasks branch on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import report_builders as r
import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import Excerpt, Finding, Fix, Gain
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Fact, Snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import audit_json, facts
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine

NOW = "2031-05-06T07:08:09+00:00"


def fleet() -> dict[str, Snapshot]:
    guest = b.guest(2, "llm1", p2p=b.granted(2, "NS"), unrecognised=("x.txt",))
    node = b.hypervisor(b.vm_config(*b.TWO, cpu="host,hidden=1"), host="pve1")
    return {"pve1": node, "llm1": guest}


def document(hosts: dict[str, Snapshot]) -> dict[str, object]:
    return audit_json.document(hosts, engine.judge(hosts), generated_at=NOW)


def facts_of(snapshot: Snapshot) -> dict[str, object]:
    return facts.facts(snapshot, engine.judge({snapshot.host: snapshot})[snapshot.host])


def test_the_document_has_the_published_shape() -> None:
    made = document(fleet())
    assert made["schema"] == "peerlane.audit/1"
    assert made["generated_at"] == NOW
    assert list(made["hosts"]) == ["llm1", "pve1"]
    host = made["hosts"]["llm1"]
    assert set(host) == {"role", "facts", "findings", "unrecognised"}
    assert host["role"] == "guest"
    assert host["unrecognised"] == ["x.txt"]
    assert set(made["summary"]) == {"hosts", "by_state", "by_severity", "blocking"}
    assert made["drift"]["not_compared"]


def described(schema: Mapping[str, Any], part: Mapping[str, Any], value: Any, where: str = "$") -> list[str]:
    """Return where a document and its schema disagree about keys and types: what this schema uses, no more."""
    if "$ref" in part:
        part = schema["$defs"][part["$ref"].rpartition("/")[2]]
    if "anyOf" in part:
        tried = [described(schema, one, value, where) for one in part["anyOf"]]
        return [] if any(not one for one in tried) else [where]
    if "const" in part:
        return [] if value == part["const"] else [where]
    if "enum" in part:
        return [] if value in part["enum"] else [f"{where}: {value!r}"]
    kinds = part.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    types = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}
    if kinds and not any(type(value) is types[one] for one in kinds):
        return [f"{where}: {type(value).__name__}"]
    wrong = []
    if isinstance(value, dict):
        known, rest = part.get("properties", {}), part.get("additionalProperties", True)
        wrong += [f"{where}.{name} is missing" for name in part.get("required", ()) if name not in value]
        for name, one in value.items():
            if name in known:
                wrong += described(schema, known[name], one, f"{where}.{name}")
            elif rest is False:
                wrong.append(f"{where}.{name} is not described")
            elif isinstance(rest, dict):
                wrong += described(schema, rest, one, f"{where}.{name}")
    if isinstance(value, list) and "items" in part:
        for at, one in enumerate(value):
            wrong += described(schema, part["items"], one, f"{where}[{at}]")
    return wrong


def documents() -> dict[str, dict[str, Any]]:
    hosts = {f"g{at}": b.guest(2, f"g{at}", p2p=b.granted(2, "OK" if at else "NS")) for at in range(3)}
    return {
        "guest and node": document(fleet()),
        "drift": document({**hosts, "odd": b.snapshot(None, "odd")}),
        "nothing known": document({"x": b.snapshot(None, "x")}),
        "measured": document({"bm": r.bare("bm", measurements={"p2p": (r.copied(8),)})}),
    }


@pytest.mark.parametrize("name", list(documents()))
def test_every_key_is_in_the_schema_and_every_key_of_the_schema_is_there(name: str) -> None:
    schema = audit_json.schema()
    assert not described(schema, schema, json.loads(json.dumps(documents()[name])))


@pytest.mark.parametrize("name", list(documents()))
def test_a_validator_accepts_it(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(audit_json.schema())
    jsonschema.validate(json.loads(json.dumps(documents()[name])), audit_json.schema())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda made: made.pop("drift"),
        lambda made: made.update(more=1),
        lambda made: made["hosts"]["llm1"].update(role="server"),
        lambda made: made["hosts"]["llm1"]["findings"][0].update(rung="claimed"),
        lambda made: made["hosts"]["llm1"]["findings"][0].pop("reason"),
        lambda made: made["hosts"]["llm1"]["facts"].pop("gpus"),
        lambda made: made["summary"]["by_state"].update(good=1),
    ],
)
def test_the_schema_refuses_what_is_not_the_shape(spoil: Callable[[dict[str, Any]], object]) -> None:
    schema, made = audit_json.schema(), json.loads(json.dumps(document(fleet())))
    spoil(made)
    assert described(schema, schema, made)


def test_every_noun_of_a_snapshot_is_described() -> None:
    nouns = set(b.snapshot("guest").as_dict())
    assert nouns == set(audit_json.schema()["$defs"]["facts"]["properties"])


def test_the_summary_counts_what_is_there() -> None:
    made = document(fleet())
    every = [one for host in made["hosts"].values() for one in host["findings"]]
    assert sum(made["summary"]["by_state"].values()) == len(every)
    bad = [one for one in every if one["state"] in ("fail", "warn")]
    assert sum(made["summary"]["by_severity"].values()) == len(bad)
    assert made["summary"]["hosts"] == 2
    assert "pve1/B1" in made["summary"]["blocking"]
    assert "llm1/D5" in made["summary"]["blocking"]


def test_the_same_input_gives_the_same_bytes() -> None:
    first = json.dumps(document(fleet()))
    hosts = fleet()
    second = json.dumps(document({"llm1": hosts["llm1"], "pve1": hosts["pve1"]}))
    assert first == second


def test_findings_keep_the_order_cause_first() -> None:
    rules = [one["rule"] for one in document(fleet())["hosts"]["llm1"]["findings"]]
    assert rules.index("D1") < rules.index("D5")


def test_a_large_fleet_is_written_without_white_space_and_means_the_same() -> None:
    small = document(fleet())
    large = {**small, "hosts": {f"h{at}": small["hosts"]["llm1"] for at in range(60)}}
    assert json.loads(audit_json.text(small)) == json.loads(json.dumps(small))
    assert json.loads(audit_json.text(large)) == json.loads(json.dumps(large))
    assert audit_json.text(small).startswith('{\n "drift"')
    assert "\n" not in audit_json.text(large).rstrip("\n")


def test_a_number_that_is_none_is_null() -> None:
    odd = b.guest(1, "x", gpus=b.smi_gpus(1, power_draw_w=float("nan"), power_limit_w=float("inf")))
    made = json.loads(audit_json.text(document({"x": odd})))
    (gpu,) = made["hosts"]["x"]["facts"]["gpus"]["value"]
    assert (gpu["power_draw_w"], gpu["power_limit_w"]) == (None, None)


def test_bulky_parts_stay_in_the_snapshot_folder() -> None:
    guest = b.guest(1, "x", pci=b.pci(b.gpu_function(config_hex="de10" * 64)))
    guest = replace(guest, gpus=b.smi_gpus(1, raw={"Serial Number": "7"}))
    text = json.dumps(document({"x": guest}))
    assert "de10de10" not in text
    assert "Serial Number" not in text


def test_facts_have_the_public_keys_and_plain_types() -> None:
    made = facts_of(fleet()["llm1"])
    public = {"role", "gpus", "p2p", "topology", "driver", "findings", "blocking", "measurements", "advice"}
    assert public <= set(made)
    assert json.loads(json.dumps(made)) == made
    assert made["role"] == "guest"
    assert [gpu["bdf"] for gpu in made["gpus"]] == ["0000:01:00.0", "0000:02:00.0"]
    assert made["gpus"][0]["architecture"] == "blackwell"
    assert made["driver"]["version"] == "580.95.05"
    assert made["blocking"] == ["D1", "D5"]


@pytest.mark.parametrize(
    ("judged", "state", "rung"),
    [
        (b.guest(p2p=b.granted(2)), "granted", 0),
        (b.guest(p2p=b.granted(2, "NS")), "refused", 0),
        (b.guest(4, p2p=b.granted(4, "NS", g0_1="OK", g1_0="OK")), "islands", 0),
        (b.guest(p2p={"r": b.matrix("r", 2)}), "unknown", 0),
        (b.guest(), "unknown", None),
        (b.guest(1), "single", None),
        (b.guest(p2p=b.granted(2), measurements=b.delivered()), "delivered", 3),
        (b.guest(p2p=b.granted(2), measurements=b.not_delivered()), "failed", 0),
    ],
)
def test_the_state_of_the_paths_carries_its_rung(judged: Snapshot, state: str, rung: int | None) -> None:
    p2p = facts_of(judged)["p2p"]
    assert (p2p["state"], p2p["rung"]) == (state, rung)


OFF = {"NCCL_P2P_DISABLE": "1"}


@pytest.mark.parametrize(
    ("judged", "nccl_env", "reason"),
    [
        # Fail closed in a guest, whatever the driver claims.
        (b.guest(p2p=b.granted(2)), OFF, "not verified"),
        (b.guest(p2p=b.granted(2, "NS")), OFF, "not verified"),
        (b.guest(), OFF, "not verified"),
        (b.guest(p2p=b.granted(2), measurements=b.delivered()), {}, "verified"),
        (b.guest(measurements=b.not_delivered()), OFF, "failed"),
        (b.guest(1), {}, "one GPU"),
        (b.guest(0), {}, "no NVIDIA GPU"),
        (b.snapshot("bare_metal", pci=b.pci(*b.gpus_on_bus(2))), {}, "bare metal"),
        (b.snapshot("bare_metal", measurements=b.not_delivered()), OFF, "failed"),
        (b.snapshot(None), {}, "role of this machine is not known"),
        (b.snapshot("bare_metal", pci=b.pci()), {}, "no NVIDIA GPU"),
    ],
)
def test_advice_is_only_what_the_audit_justifies(judged: Snapshot, nccl_env: dict[str, str], reason: str) -> None:
    advice = facts_of(judged)["advice"]
    assert advice["nccl_env"] == nccl_env
    assert any(reason in one for one in advice["reasons"])
    assert bool(advice["engine_args"]) == bool(nccl_env)
    assert advice["tp"] is None
    if nccl_env:
        assert advice["engine_args"]["vllm"] == ["--disable-custom-all-reduce"]
        assert advice["engine_args"]["sglang"] == ["--disable-custom-all-reduce"]


def test_islands_and_matrix_are_there_for_tasks() -> None:
    p2p = facts_of(b.guest(4, p2p=b.granted(4, "NS", g0_1="OK", g1_0="OK")))["p2p"]
    assert p2p["islands"] == [["GPU0", "GPU1"], ["GPU2"], ["GPU3"]]
    assert p2p["matrix"]["GPU0-GPU1"] == {"r": "OK", "w": "OK"}


def test_a_host_in_pieces_is_the_text_of_its_plain_shape() -> None:
    gain = Gain("1 -> 2", "GB/s", "somewhere")
    odd = Finding(
        "D5", "llm1", "fail", 't \u00e9 "q" \x07', evidence=(Excerpt("s", "a\nb"),), expected_gain=gain, rung=2
    )
    told = Finding("D6", "llm1", "pass", "", fix=Fix("f", ("one",)), explains=("D1", "pve1/B1"), sources=("x", "y"))
    fact = Fact({1: frozenset(("b", "a"))}, "s", "e")
    hosts = fleet()
    hosts["llm1"] = replace(hosts["llm1"], memory=replace(hosts["llm1"].memory, huge_pages=fact))
    findings = {host: (*found, odd, told) for host, found in engine.judge(hosts).items()}
    whole = audit_json.document(hosts, findings, generated_at=NOW)
    for host, snapshot in hosts.items():
        for _ in range(2):  # the second time from what was kept of the first
            text = audit_json.host_text(snapshot, findings[host])
            assert text == json.dumps(whole["hosts"][host], sort_keys=True, separators=(",", ":"))
    summary = audit_json.Summary()
    for host in reversed(hosts):
        summary.add(host, findings[host])
    assert summary.as_dict() == whole["summary"]
