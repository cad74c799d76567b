"""The plan says what each role will do, what is off and why; the summary says what came of it."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import provision

SETTINGS = {
    "nvidia_driver_enabled": "auto",
    "nvidia_driver_branch": "auto",
    "cuda_toolkit_versions": [],
    "inference_engine_name": "llama_cpp",
    "inference_engine_version": "",
    "model_weights_name": "small",
    "model_weights_source": "/data/small",
    "model_weights_source_on": "target",
    "model_service_name": "chat",
    "model_service_port": 8000,
    "nccl_settings_extra": {},
}
GPU = {"name": "RTX PRO 6000", "bdf": "0000:01:00.0"}


def finding(rule, severity="high", state="fail"):
    return {"rule": rule, "severity": severity, "state": state, "title": f"{rule} is wrong"}


def facts(gpus=(), findings=(), blocking=(), **more):
    shape = {"role": "guest", "gpus": list(gpus), "driver": {"version": None}, "advice": {"nccl_env": {}}}
    return {**shape, "findings": list(findings), "blocking": list(blocking), **more}


def steps(given, **changed):
    made = provision.plan("box", given, "Debian 13", {**SETTINGS, **changed})
    return {step.role: step for step in made.steps}


def test_every_role_of_the_playbook_has_its_line_in_order():
    made = provision.plan("box", facts(), "Debian 13", SETTINGS)

    assert tuple(step.role for step in made.steps) == provision.ROLES
    assert made.text().splitlines()[0] == "box: guest · Debian 13 · no NVIDIA GPU"
    assert made.as_dict()["roles"] == made.roles()


def test_a_host_without_gpus_gets_no_driver():
    assert (steps(facts())["nvidia_driver"].active, steps(facts())["nvidia_driver"].text) == (
        False,
        "no NVIDIA GPU on the bus",
    )
    assert steps(facts(gpus=[GPU]))["nvidia_driver"].active
    assert steps(facts(), nvidia_driver_enabled="true")["nvidia_driver"].active
    assert not steps(facts(gpus=[GPU]), nvidia_driver_enabled="no")["nvidia_driver"].active


def test_the_driver_line_tells_what_runs_now():
    now = facts(gpus=[GPU], driver={"version": "580.95.05"})

    assert steps(now)["nvidia_driver"].text == "the branch that the GPUs need; 580.95.05 runs now"
    assert steps(facts(gpus=[GPU]), nvidia_driver_branch="580")["nvidia_driver"].text == "branch 580; none runs now"
    assert provision.known(now, "Debian 13") == "guest · Debian 13 · 1x RTX PRO 6000 · driver 580.95.05"
    assert provision.known(facts(gpus=[GPU, GPU]), "") == "guest · system unknown · 2x RTX PRO 6000 · no driver running"


def test_without_a_model_nothing_is_fetched_or_served():
    made = steps(facts(), model_weights_source="")

    for role in ("model_weights", "model_service"):
        assert (made[role].active, made[role].text) == (False, "model_weights_source is not set")
    assert made["inference_engine"].active


def test_what_is_asked_for_is_named():
    made = steps(
        facts(gpus=[GPU], advice={"nccl_env": {"NCCL_P2P_DISABLE": "1"}}),
        cuda_toolkit_versions=["12.8", 13.0],
        nccl_settings_extra={"NCCL_DEBUG": "WARN"},
        model_weights_source_on="controller",
    )

    assert made["cuda_toolkit"].text == "12.8, 13.0"
    assert made["nccl_settings"].text == "NCCL_P2P_DISABLE, NCCL_DEBUG"
    assert made["model_weights"].text == "small from /data/small on the controller"
    assert made["model_service"].text == "chat on port 8000"


def test_a_blocking_finding_stops_unless_it_is_accepted():
    given = facts(findings=[finding("A5"), finding("B4", "critical")], blocking=["B4", "A5"])
    made = provision.plan("box", given, "Debian 13", SETTINGS, provision.accepted_ids("a5, x9"))

    assert made.blocking == ("B4",)
    assert made.accepted == ("A5",)
    assert "STOP" in made.text() and "B4 must be dealt with first" in made.text()
    message = provision.gate_message(made.as_dict(), given["findings"])
    assert message == "B4: B4 is wrong; see: peerlane rules B4; or accept it: -e peerlane_accept_findings=B4"
    both = provision.plan("box", given, "", SETTINGS, ["B4", "A5"])
    assert provision.gate_message(both.as_dict(), given["findings"]) == ""


def test_what_the_run_itself_deals_with_does_not_stop_it():
    gpu = {"name": "A GPU", "bdf": "0000:01:00.0"}
    given = facts(gpus=[gpu], findings=[finding("F1", "critical"), finding("D5", "high")], blocking=["F1", "D5"])

    made = provision.plan("box", given, "Debian 13", SETTINGS, [])
    without = provision.plan("box", given, "Debian 13", {**SETTINGS, "nvidia_driver_enabled": False}, [])

    assert made.blocking == ()
    assert made.handled == ("F1 (nvidia_driver)", "D5 (served without peer-to-peer)")
    assert without.blocking == ("F1",)


@pytest.mark.parametrize(
    ("value", "ids"),
    [(None, []), ("", []), ("D1", ["D1"]), ("d1, b4 ,", ["D1", "B4"]), (["d1", "B4"], ["D1", "B4"])],
)
def test_accepted_findings_are_a_list_or_a_string(value, ids):
    assert provision.accepted_ids(value) == ids


def test_findings_are_listed_once_and_the_worst_first():
    rows = [
        finding("D1", "low", "warn"),
        finding("B4", "critical"),
        finding("B4", "critical"),
        finding("A1", "x", "pass"),
    ]

    assert provision.bad_findings(rows) == ("B4 (critical)", "D1 (low)")


def test_the_summary_tells_gone_left_and_new():
    service = {"url": "http://10.0.0.1:8000", "prompt": "Who?", "answer": " I\n am. ", "tokens_per_s": 12.34}
    made = provision.summary("box", ["F1 (high)", "D1 (low)"], [finding("D1", "low"), finding("C1")], service, False)

    assert (made["gone"], made["left"], made["new"]) == (["F1 (high)"], ["D1 (low)"], ["C1 (high)"])
    for row in (
        "no longer found  F1 (high)",
        "service          http://10.0.0.1:8000",
        "answered         I am.",
        "12.3 tokens/s",
    ):
        assert row in made["text"]


def test_the_summary_does_not_claim_what_nobody_said():
    made = provision.summary("box", [], [], {"url": None, "answer": None, "tokens_per_s": None}, False)

    assert "none (model_weights_source is not set)" in made["text"]
    assert "tokens/s" not in made["text"]
    assert "check mode: nothing was changed" in provision.summary("box", [], [], {"url": "x"}, True)["text"]
