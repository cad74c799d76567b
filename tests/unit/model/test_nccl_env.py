"""The NCCL plan writes what is justified, and refuses what NCCL would ignore without a word."""

from __future__ import annotations

import json

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import nccl_env

GUEST = {"nccl_env": {"NCCL_P2P_DISABLE": "1"}, "reasons": ["guest without verified peer-to-peer delivery"]}


def test_the_audit_s_variable_comes_with_its_reason():
    variables = nccl_env.plan(GUEST, {})

    assert nccl_env.file_text(variables) == "NCCL_P2P_DISABLE=1\n"
    why = json.loads(nccl_env.provenance_text(variables))["variables"]["NCCL_P2P_DISABLE"]
    assert why == {"origin": "audit", "reason": GUEST["reasons"][0], "value": "1"}


def test_nothing_justified_is_an_empty_plan():
    assert nccl_env.plan({"nccl_env": {}, "reasons": []}, {}) == ()
    assert nccl_env.plan(None, {}) == ()


def test_the_user_wins_over_the_audit():
    (variable,) = nccl_env.plan(GUEST, {"NCCL_P2P_DISABLE": 0})

    assert (variable.value, variable.origin) == ("0", "user")


@pytest.mark.parametrize("value", [True, 1, "1"])
def test_a_yaml_boolean_becomes_the_digit_that_nccl_reads(value):
    assert nccl_env.file_text(nccl_env.plan(None, {"NCCL_P2P_DISABLE": value})) == "NCCL_P2P_DISABLE=1\n"


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("NCCL_P2P_LEVEL", "sys", "did you mean SYS"),
        ("NCCL_P2P_LEVEL", "NODE", "one of LOC"),
        ("NCCL_P2P_DISABLE", "true", "only the digit 1"),
        ("NCCL_ALGO", "allreduce:ring # why", "literally"),
        ("NCCL_MAX_CTAS", '"8"', "literally"),
        ("NCCL_DEBUG", "", "literally"),
        ("nccl_debug", "INFO", "no NCCL variable"),
        ("LD_PRELOAD", "x", "no NCCL variable"),
        ("NCCL_SHM_DISABLE", "1", "sockets"),
        ("NCCL_IGNORE_DISABLED_P2P", "2", "refuses"),
    ],
)
def test_what_nccl_would_ignore_or_misuse_is_refused(name, value, complaint):
    with pytest.raises(InputError, match=complaint) as caught:
        nccl_env.plan(None, {name: value})

    assert "\n" not in caught.value.line()
    assert caught.value.line().startswith("nccl_settings_extra: ")


@pytest.mark.parametrize("level", [*nccl_env.P2P_LEVELS, "3"])
def test_every_level_that_nccl_knows_is_taken(level):
    assert nccl_env.plan(None, {"NCCL_P2P_LEVEL": level})[0].value == level
