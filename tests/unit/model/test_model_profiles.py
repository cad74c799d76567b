"""Model profiles: shapes against published figures, the strict reader, a user's file over the shipped ones."""

from __future__ import annotations

import dataclasses

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import engine_matrix, fit, model_profile, strict_yaml
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model.model_profile import Support

PROFILES = model_profile.profiles()

OWN = """family: tiny
title: Tiny
source: a test
shape:
  layers: 2
  hidden_size: 64
  vocabulary: 260
  heads: 2
  context: 512
  dense_width: 128
  attention: {kind: gqa, kv_heads: 2, head_size: 32}
models:
  tiny-one:
    title: Tiny one
    weights:
      bf16: {other: bf16}
engines:
  vllm:
    checked_with: "0.33.0"
    recommended:
      seed:
        flag: --seed
        value: 7
        versions: ">=0.10"
        why: a test
        source: a test
"""


def own(tmp_path, text):
    place = tmp_path / "own.yml"
    place.write_text(text)
    return place


# --- the shipped ones -----------------------------------------------------------------------------------------------


def test_every_family_that_is_promised_is_there():
    families = {one.family for one in PROFILES.values()}

    assert families == {
        *("kimi-k2", "glm-5", "minimax-m2", "deepseek-v3"),
        *("qwen3", "llama-3", "gpt-oss", "lab-tiny"),
    }
    assert {"qwen3-235b", "qwen3-coder-480b", "kimi-k2.5", "glm-5", "deepseek-v3.2", "gpt-oss-120b"} <= set(PROFILES)


@pytest.mark.parametrize(
    ("name", "billions", "reduces", "small", "bytes_per_token"),
    [
        ("kimi-k2.5", 1026, 123, 0, 14336),
        ("deepseek-v3.1", 671, 123, 0, 14336),
        ("deepseek-v3.2", 672, 123, 0, 14336),
        ("glm-5", 744, 157, 0, 12288),
        ("glm-5.2", 743, 157, 0, 12288),
        ("minimax-m2.5", 229, 125, 62, 6144),
        ("qwen3-235b", 235, 189, 0, 8192),
        ("qwen3-coder-480b", 480, 125, 0, 12288),
        ("llama-3.3-70b", 70.6, 161, 0, 16384),
        ("llama-3.1-8b", 8.0, 65, 0, 8192),
        ("gpt-oss-120b", 117, 73, 0, 5760),
        ("gpt-oss-20b", 21, 49, 0, 5760),
    ],
)
def test_parameters_and_all_reduces_are_the_published_ones(name, billions, reduces, small, bytes_per_token):
    shape = PROFILES[name].shape

    assert shape.parameters().total / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.all_reduces().count == reduces
    assert shape.all_reduces().small_count == small
    assert shape.all_reduces().bytes_per_token == bytes_per_token


@pytest.mark.parametrize(
    ("name", "weights", "gigabytes"),
    [
        ("kimi-k2.5", "int4", 32.7),
        ("deepseek-v3.1", "fp8", 37.4),
        ("minimax-m2.5", "fp8", 11.0),
        ("qwen3-235b", "fp8", 22.1),
        ("llama-3.3-70b", "fp8", 70.6),
        ("gpt-oss-120b", "mxfp4", 5.0),
    ],
)
def test_bytes_read_for_a_token_are_those_of_the_cost_model(name, weights, gigabytes):
    one = PROFILES[name]

    assert fit.active_bytes(one.shape, one.weights[weights]) / 1e9 == pytest.approx(gigabytes, rel=0.015)


@pytest.mark.parametrize("one", PROFILES.values(), ids=lambda one: one.name)
def test_what_is_told_of_a_size_and_what_the_shape_gives_agree(one):
    for weights in one.weights.values():
        if weights.bytes is not None:
            computed = fit.weight_bytes(one.shape, dataclasses.replace(weights, bytes=None))
            # Draft layers (MTP) are on disk and not in the shape: 2 to 4 % of DeepSeek and GLM.
            assert weights.bytes / computed == pytest.approx(1.01, abs=0.04), weights.name


@pytest.mark.parametrize("one", PROFILES.values(), ids=lambda one: one.name)
def test_each_row_can_hold_for_some_release_and_says_why(one):
    rows = (*one.flags, *one.variables, *one.forbidden, *one.support)
    for row in rows:
        assert row.why and row.source
        assert row.engine in one.checked_with
        newest = one.checked_with[row.engine]
        seen = (newest, "0.5.9", "0.5.15.post1", "0.5.17", "0.10.2", "0.15.1", "0.22.1", "0.25.0", "0.3")
        assert any(version in row.versions for version in seen), row.name


def test_rows_of_one_flag_never_recommend_what_is_forbidden():
    for one in PROFILES.values():
        for engine, version in one.checked_with.items():
            for sm in (80, 89, 90, 100, 120, 121):
                for weights in one.weights:
                    for flag in one.flags:
                        for bad in one.forbidden:
                            both = flag.holds(engine, version, sm, weights) and bad.holds(engine, version, sm, weights)
                            if both and flag.flag == bad.flag:
                                assert bad.values and str(flag.value) not in bad.values, (one.name, bad.name)


def test_checked_with_is_a_release_of_the_matrix():
    for one in PROFILES.values():
        for engine, version in one.checked_with.items():
            assert engine_matrix.build(engine, version).version == version


def test_no_two_states_are_claimed_for_one_case():
    for one in PROFILES.values():
        for engine in one.checked_with:
            for version in ("0.5.9", "0.5.14", "0.5.17", "0.5.23", "0.15.0", "0.21.0", "0.25.0", "0.33.0"):
                for sm in (80, 89, 90, 100, 120, 121):
                    for weights in one.weights:
                        rows = [row for row in one.support if row.holds(engine, version, sm, weights)]
                        assert {row.state for row in rows} != {"serves", "fails"}, (one.name, engine, version, sm)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("GLM-5", "glm-5"),
        ("kimi-k2", "kimi-k2.5"),
        ("nvidia/GLM-5-NVFP4", "glm-5"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("moonshotai/Kimi-K2.6", "kimi-k2.6"),
    ],
)
def test_a_profile_goes_by_its_name_its_family_and_its_repository(asked, name):
    assert model_profile.profile(asked).name == name


@pytest.mark.parametrize(
    ("asked", "said"), [("kimi-k25", "did you mean kimi-k2.5?"), ("zzzzzz", "list them with: peerlane models")]
)
def test_a_name_that_is_none(asked, said):
    with pytest.raises(InputError) as caught:
        model_profile.profile(asked)

    assert said in caught.value.line()
    assert "\n" not in caught.value.line()


# --- a user's own file ----------------------------------------------------------------------------------------------


def test_a_model_of_its_own(tmp_path):
    one = model_profile.profile("tiny-one", own(tmp_path, OWN))

    assert one.shape.layers == 2
    assert one.flags[0].words() == "--seed 7"
    assert model_profile.profile("glm-5", own(tmp_path, OWN)).name == "glm-5"


def test_a_file_changes_one_row_adds_one_and_takes_one_away(tmp_path):
    text = """
family: glm-5
models:
  glm-5:
    weights:
      nvfp4: {size_gb: 470}
      bf16: null
engines:
  sglang:
    recommended:
      tool-calls: {value: mine}
      extra: {flag: --log-level, value: warning, versions: ">=0.5", why: less noise, source: us}
    forbidden:
      dsa-decode-sm120: null
"""
    shipped = model_profile.profile("glm-5")
    one = model_profile.profile("glm-5", own(tmp_path, text))

    assert one.weights["nvfp4"].bytes == 470e9
    assert one.weights["nvfp4"].experts == "nvfp4"
    assert set(one.weights) == {"nvfp4", "fp8"}
    flags = {row.name: row for row in one.flags if row.engine == "sglang"}
    assert flags["tool-calls"].value == "mine"
    before = {row.name: row for row in shipped.flags if row.engine == "sglang"}
    assert flags["tool-calls"].source == before["tool-calls"].source
    assert flags["extra"].words() == "--log-level warning"
    assert "dsa-decode-sm120" in {row.name for row in shipped.forbidden}
    assert "dsa-decode-sm120" not in {row.name for row in one.forbidden}
    assert model_profile.profile("glm-5").weights["nvfp4"].bytes == 465e9


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "hidden_size: 64",
            "hiden_size: 64",
            "own.yml:6: shape.hiden_size: there is no key 'hiden_size'; did you mean",
        ),
        ("versions:", "version:", "recommended.seed.version: there is no key 'version'; did you mean versions?"),
        ("models:", "model:", "there is no key 'model'; did you mean models?"),
        ('">=0.10"', '"0.10+"', "recommended.seed.versions: '0.10+' is no range of versions"),
        ('checked_with: "0.33.0"', 'checked_with: "new"', "checked_with: 'new' is no version"),
        ("flag: --seed", "flag: --seed 7", "'--seed 7' is no flag; write --name"),
        ("kind: gqa", "kind: gqq", "shape.attention.kind: 'gqq' is not known here; did you mean gqa?"),
        ("kind: gqa, ", "", "kind is missing; add it: mla or gqa"),
        ("kv_heads: 2, ", "", "kv_heads is missing for gqa"),
        ("head_size: 32", "head_size: 32, kv_rank: 5", "kv_rank does not belong to gqa"),
        ("layers: 2", "layers: two", "shape.layers: 'two' is no whole number"),
        ("layers: 2", "layers: true", "shape.layers: True is no whole number"),
        ("layers: 2", "layers: 0", "are at least 1"),
        ("  dense_width: 128\n", "", "dense_width is missing for a model without experts"),
        (
            "{other: bf16}",
            "{other: bf17}",
            "models.tiny-one.weights.bf16.other: 'bf17' is not known here; did you mean bf16",
        ),
        ("{other: bf16}", "{experts: bf16}", "models.tiny-one.weights.bf16: other is missing"),
        ("        why: a test\n", "", "engines.vllm.recommended.seed: why is missing"),
        ("        why: a test\n", "        why: a test\n        sm: Hopper\n", "'Hopper' is no range of GPU"),
        ("        why: a test\n", "        why: a test\n        weights: [fp9]\n", "the family has no weights fp9"),
        ("        why: a test\n", "        why: a test\n        models: [tiny-two]\n", "did you mean tiny-one?"),
        ("  vllm:", "  vlm:", "engines.vlm: there is no key 'vlm'; did you mean vllm?"),
        ("title: Tiny\n", "title: Tiny\ntitle: Big\n", "own.yml:3: the key title stands there twice"),
        ("title: Tiny\n", "title: [Tiny\n", "is no YAML"),
        ("title: Tiny\n", "title: &a Tiny\nx: *a\n", "anchors and aliases are not read here"),
        ("family: tiny\n", "", "family is missing"),
        (OWN, "- a\n- b\n", "is no mapping of keys to values"),
        (OWN, "", "is no mapping"),
        (OWN, "family: glm-5\nmodels: 7\n", "models: 7 is no mapping"),
        (OWN, "family: glm-5\nshape: {layers: null}\n", "layers is missing"),
        (OWN, OWN.replace("tiny-one", "glm-5"), "a model glm-5 is in glm-5 too"),
        (OWN, "[" * 5000, "own.yml"),
        ("layers: 2", "layers: 100000000000", "is no whole number"),
        ("    weights:\n      bf16: {other: bf16}\n", "    weights: {}\n", "models.tiny-one: weights are missing"),
        ("      bf16: {other: bf16}\n", "      bf16: null\n", "weights are missing"),
        ("        why: a test\n", '        why: a test\n        sm: "120-90"\n', "120-90 ends before it begins"),
    ],
)
def test_a_slip_is_one_line_with_its_place(tmp_path, old, new, said):
    assert old in OWN
    place = own(tmp_path, OWN.replace(old, new, 1))

    with pytest.raises(InputError) as caught:
        model_profile.profiles(place)

    assert said in caught.value.line()
    assert "\n" not in caught.value.line()
    assert "own.yml" in caught.value.line()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OWN.replace("value: 7", "value: null"), ["--seed"]),
        (OWN.split("engines:")[0] + "engines: {vllm: null}\n", []),
        (OWN.split("    recommended:")[0] + "    recommended: {seed: null}\n", []),
    ],
)
def test_null_takes_away_in_a_new_family_too(tmp_path, text, expected):
    one = model_profile.profile("tiny-one", own(tmp_path, text))

    assert [row.words() for row in one.flags] == expected


def test_a_file_that_cannot_be_read(tmp_path):
    for place, said in (
        (tmp_path / "gone.yml", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        with pytest.raises(InputError, match=said):
            model_profile.profiles(place)
    (tmp_path / "bytes.yml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(InputError, match="is no text"):
        model_profile.profiles(tmp_path / "bytes.yml")


def test_merging_takes_away_what_is_null():
    assert strict_yaml.merge({"a": {"b": 1, "c": 2}}, {"a": {"b": None}, "d": {"e": None, "f": 1}}) == {
        "a": {"c": 2},
        "d": {"f": 1},
    }


def test_a_row_holds_where_nothing_else_is_asked():
    row = next(row for row in PROFILES["glm-5"].support if row.name == "sm120-field")

    assert isinstance(row, Support)
    assert row.holds("sglang", "0.5.9", 120, "nvfp4")
    assert not row.holds("sglang", "0.5.13", 120, "nvfp4")
    assert not row.holds("sglang", "0.5.9", 90, "nvfp4")
    assert not row.holds("sglang", "0.5.9", 120, "fp8")
    assert not row.holds("vllm", "0.5.9", 120, "nvfp4")
