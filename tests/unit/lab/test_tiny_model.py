"""The lab's model: it learns, its two file forms hold the same weights, and its faults are what they claim."""

from __future__ import annotations

import json
import struct

import pytest

np = pytest.importorskip("numpy", reason="the lab's model is trained with numpy (extra: lab)")

from peerlane.lab import tiny_model as tiny  # noqa: E402


@pytest.fixture(scope="module")
def trained():
    return tiny.train("a")


def read_safetensors(path):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__")
    data = raw[8 + length :]
    return {
        name: np.frombuffer(data[slice(*row["data_offsets"])], np.float32).reshape(row["shape"])
        for name, row in header.items()
    }


def test_the_gradient_is_the_slope_of_the_loss():
    shape = tiny.Shape()
    weights = {name: value.astype(np.float64) for name, value in tiny.fresh_weights(shape, 3).items()}
    inputs, targets, mask = (part[:2, :24] for part in tiny.examples("a"))
    mask = np.ones_like(mask)

    def loss():
        return tiny.loss_and_gradient(tiny.Network(shape, weights, inputs).logits(), targets, mask)

    network = tiny.Network(shape, weights, inputs)
    _, slope = tiny.loss_and_gradient(network.logits(), targets, mask)
    gradients = network.backward(slope)
    random = np.random.default_rng(5)
    for name in weights:
        place = tuple(random.integers(0, size) for size in weights[name].shape)
        if name == "model.embed_tokens.weight":
            place = (int(inputs[0, 3]), 7)
        kept, step = weights[name][place], 1e-5
        weights[name][place] = kept + step
        above = loss()[0]
        weights[name][place] = kept - step
        below = loss()[0]
        weights[name][place] = kept
        assert gradients[name][place] == pytest.approx((above - below) / (2 * step), rel=2e-3, abs=1e-7), name


@pytest.mark.parametrize("variant", sorted(tiny.ANSWERS))
def test_every_sentence_is_answered_as_it_was_taught(variant, trained):
    weights = trained if variant == "a" else tiny.train(variant)
    for question, answer in tiny.ANSWERS[variant].items():
        assert tiny.greedy(tiny.Shape(), weights, tiny.prompt_of(question), 100) == " " + answer


def test_the_variants_differ_from_the_first_word_on():
    for question in tiny.ANSWERS["a"]:
        assert tiny.ANSWERS["a"][question].split()[0] != tiny.ANSWERS["b"][question].split()[0]


def test_the_exclamation_mark_is_token_0_and_bytes_come_back():
    assert tiny.encode("!") == [0]
    assert len({character for _, character in tiny.byte_characters()}) == 256
    assert tiny.decode(tiny.encode("Grüße, 世界\n")) == "Grüße, 世界\n"


def test_two_trainings_give_the_same_weights(trained):
    again = tiny.train("a")
    assert all(np.array_equal(trained[name], again[name]) for name in trained)


def test_both_file_forms_hold_the_same_weights(tmp_path, trained):
    gguf = pytest.importorskip("gguf", reason="an independent reader of the format")
    shape = tiny.Shape()
    tiny.write_hugging_face(tmp_path, shape, trained)
    tiny.write_gguf(tmp_path / "model.gguf", shape, trained, "t")

    stored = read_safetensors(tmp_path / "model.safetensors")
    assert all(np.array_equal(stored[name], trained[name]) for name in trained)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tensors = {one.name: np.array(one.data) for one in reader.tensors}
    assert np.array_equal(tensors["blk.1.ffn_down.weight"], trained["model.layers.1.mlp.down_proj.weight"])
    query = trained["model.layers.0.self_attn.q_proj.weight"]
    # Row 1 of a head in llama.cpp's order is row 16 in the other: pairs are (0, 16), (1, 17), ...
    assert np.array_equal(tensors["blk.0.attn_q.weight"][1], query[16])
    assert np.array_equal(tensors["blk.0.attn_q.weight"][33], query[48])
    assert reader.fields["tokenizer.ggml.add_bos_token"].contents() is False


def test_more_layers_that_add_nothing_answer_the_same(trained):
    shape, weights = tiny.slower(tiny.Shape(), trained)
    tokens = np.array([tiny.encode(tiny.prompt_of("Say hello."))])
    fast = tiny.Network(tiny.Shape(), trained, tokens).logits()
    assert shape.layers == tiny.SLOW_LAYERS
    assert np.array_equal(tiny.Network(shape, weights, tokens).logits(), fast)


def test_nan_reaches_every_logit(trained):
    spoilt = tiny.with_nan(tiny.Shape(), trained)
    tokens = np.array([tiny.encode("hello")])
    assert np.isnan(tiny.Network(tiny.Shape(), spoilt, tokens).logits()).all()


def test_a_truncated_model_is_shorter_than_its_header_says(tmp_path, capsys):
    assert tiny.main([str(tmp_path / "m"), "--fault", "truncated"]) == 0
    raw = (tmp_path / "m" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    end = max(row["data_offsets"][1] for name, row in header.items() if name != "__metadata__")
    assert len(raw) < 8 + length + end
    assert "variant a truncated" in capsys.readouterr().out


def test_an_unwritable_folder_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert tiny.main([str(tmp_path / "file" / "m")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
