"""Weights arrive whole, resume where they stopped, and are named where they are damaged."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path

import pytest

from ansible_collections.peerlane.gpu.plugins.module_utils import model_files
from ansible_collections.peerlane.gpu.plugins.module_utils.model_files import ModelError, ModelFile
from ansible_collections.peerlane.gpu.plugins.module_utils.model_hub import Hub, parse_listing
from ansible_collections.peerlane.gpu.plugins.module_utils.weight_files import GGML_BLOCKS, weight_complaint

sys.path.insert(0, str(Path(__file__).parents[2]))
from simulated_hub import COMMIT, SimulatedHub


def always():
    return True


def safetensors(path, count=1000):
    header = json.dumps({"w": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + os.urandom(4 * count))


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    (folder / "more").mkdir(parents=True)
    safetensors(folder / "model.safetensors")
    (folder / "config.json").write_text("{}\n")
    (folder / "more" / "notes.txt").write_text("a note\n")
    (folder / ".gitattributes").write_text("x")
    return folder


# --- what is a model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["a.gguf"], "gguf"),
        (["config.json", "model-00001-of-2.safetensors"], "safetensors"),
        (["config.json", "m.safetensors", "m.gguf"], "gguf"),
        (["model.safetensors"], ""),
        (["config.json", "pytorch_model.bin"], ""),
        (["deep/a.gguf"], ""),
        ([], ""),
    ],
)
def test_the_format_of_a_model(names, kind):
    assert model_files.model_format(names) == kind


def test_a_folder_is_listed_without_what_no_engine_reads(source):
    assert [one.path for one in model_files.list_folder(str(source))] == [
        "config.json",
        "model.safetensors",
        "more/notes.txt",
    ]


def test_a_path_that_is_no_model_is_one_line(tmp_path):
    with pytest.raises(ModelError, match="is no model: it holds neither"):
        model_files.list_folder(str(tmp_path))
    with pytest.raises(ModelError, match="does not exist"):
        model_files.list_folder(str(tmp_path / "none"))


def test_a_truncated_source_is_refused_by_its_own_header(source):
    os.truncate(source / "model.safetensors", 500)
    with pytest.raises(ModelError, match=r"model.safetensors is truncated: 500 of \d+ bytes"):
        model_files.list_folder(str(source))


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../b", "", "a//b", "manifest.json"])
def test_a_path_that_leaves_its_folder_is_unsafe(path):
    assert not model_files.safe_path(path)


def test_dots_in_a_name_are_safe():
    assert model_files.safe_path("more/a..b.txt")


# --- weight headers --------------------------------------------------------------------------------------------------


def gguf(path, kind, elements, data_bytes):
    def text(value):
        return struct.pack("<Q", len(value)) + value

    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 3)
    head += text(b"general.alignment") + struct.pack("<II", 4, 64)
    head += text(b"names") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"bc")
    head += text(b"numbers") + struct.pack("<IIQ", 9, 5, 3) + struct.pack("<3i", 1, 2, 3)
    head += text(b"w") + struct.pack("<IQIQ", 1, elements, kind, 0)
    head += b"\0" * (-len(head) % 64)
    path.write_bytes(head + b"\1" * data_bytes)


@pytest.mark.parametrize(
    ("kind", "elements", "data_bytes", "whole"),
    [(0, 100, 400, True), (0, 100, 399, False), (12, 512, 288, True), (12, 512, 287, False), (999, 10**9, 0, True)],
)
def test_a_gguf_file_tells_whether_it_is_whole(tmp_path, kind, elements, data_bytes, whole):
    path = tmp_path / "m.gguf"
    gguf(path, kind, elements, data_bytes)
    assert (weight_complaint(str(path)) == "") is whole


@pytest.mark.parametrize("raw", [b"", b"GGUF", b"GGML" + b"\0" * 100, b"GGUF" + b"\xff" * 200, os.urandom(1000)])
def test_other_bytes_are_no_gguf(tmp_path, raw):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    assert weight_complaint(str(path)) == "has no GGUF header"


@pytest.mark.parametrize(
    "raw", [b"", b"\0" * 7, b"\xff" * 100, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 3) + b"{x}"]
)
def test_other_bytes_are_no_safetensors(tmp_path, raw):
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    assert weight_complaint(str(path)) == "has no safetensors header"


def test_block_sizes_are_those_of_the_format():
    constants = pytest.importorskip("gguf.constants", reason="the format's own table")
    assert {int(kind): tuple(sizes) for kind, sizes in constants.GGML_QUANT_SIZES.items()} == GGML_BLOCKS


# --- bringing and checking -------------------------------------------------------------------------------------------


def brought(source, folder, method="copy"):
    folder.mkdir(exist_ok=True)
    hashes = {}
    for one in model_files.list_folder(str(source)):
        assert model_files.copy_file(str(source / one.path), str(folder), one, method, always)
        hashes[one.path] = model_files.place_file(str(folder), one)
    manifest = model_files.make_manifest(str(folder), {"name": "m", "revision": "1", "source": str(source)}, hashes)
    model_files.write_manifest(str(folder), manifest)
    return manifest


@pytest.mark.parametrize("method", ["copy", "hardlink", "move"])
def test_a_brought_model_is_whole(source, tmp_path, method):
    before = {one.path: (source / one.path).read_bytes() for one in model_files.list_folder(str(source))}
    manifest = brought(source, tmp_path / "m", method)

    assert {path: (tmp_path / "m" / path).read_bytes() for path in before} == before
    assert model_files.read_manifest(str(tmp_path / "m")) == manifest
    assert model_files.damage(str(tmp_path / "m"), manifest, full=True) == {}
    assert manifest["format"] == "safetensors"
    assert manifest["total_bytes"] == sum(map(len, before.values()))


def test_damage_is_named(source, tmp_path):
    folder = tmp_path / "m"
    manifest = brought(source, folder)
    os.truncate(folder / "model.safetensors", 10)
    (folder / "config.json").write_text("{]\n")
    (folder / "more" / "notes.txt").unlink()

    wrong = model_files.damage(str(folder), manifest, full=False)
    assert wrong["model.safetensors"].startswith("is truncated: 10 of ")
    assert "altered" in wrong["config.json"]
    assert wrong["more/notes.txt"] == "is missing"


def test_a_changed_time_alone_is_no_damage(source, tmp_path):
    manifest = brought(source, tmp_path / "m")
    os.utime(tmp_path / "m" / "config.json")
    assert model_files.damage(str(tmp_path / "m"), manifest, full=False) == {}


def test_a_change_that_keeps_size_and_time_is_found_by_a_full_check_only(source, tmp_path):
    manifest = brought(source, tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    times = path.stat()
    path.write_text("{ \n"[:3])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert model_files.damage(str(tmp_path / "m"), manifest, full=False) == {}
    assert list(model_files.damage(str(tmp_path / "m"), manifest, full=True)) == ["config.json"]


def test_a_copy_goes_on_where_it_stopped(source, tmp_path):
    one = next(one for one in model_files.list_folder(str(source)) if one.path == "model.safetensors")
    folder = tmp_path / "m"
    folder.mkdir()
    part = folder / "model.safetensors.part"
    part.write_bytes((source / one.path).read_bytes()[:1000])
    assert not model_files.copy_file(str(source / one.path), str(folder), one, "copy", lambda: False)
    assert part.stat().st_size == 1000
    assert model_files.copy_file(str(source / one.path), str(folder), one, "copy", always)
    model_files.place_file(str(folder), one)
    assert (folder / one.path).read_bytes() == (source / one.path).read_bytes()


def test_a_part_that_is_not_what_was_promised_is_removed(tmp_path):
    (tmp_path / "a.json.part").write_bytes(b"12345")
    with pytest.raises(ModelError, match="sha256"):
        model_files.place_file(str(tmp_path), ModelFile("a.json", 5, sha256="00"))
    assert list(tmp_path.iterdir()) == []


def test_a_partial_file_lessens_what_is_needed(tmp_path):
    (tmp_path / "a.part").write_bytes(b"x" * 60)
    assert model_files.needed_bytes(str(tmp_path), [ModelFile("a", 100), ModelFile("b", 5)]) == 45


def test_a_full_disk_is_one_line(tmp_path):
    complaint = model_files.space_complaint(str(tmp_path / "not" / "there"), 10**18, 0)
    assert complaint.startswith(f"not enough space for {tmp_path}/not/there: 1000000.0 TB needed, ")
    assert model_files.space_complaint(str(tmp_path), 1, 0) == ""


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "other/1"}'])
def test_a_manifest_that_is_none_is_empty(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    assert model_files.read_manifest(str(tmp_path)) == {}


# --- the hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub_server(source):
    server = SimulatedHub(source, "org/m").start()
    yield server
    server.shutdown()
    server.server_close()


def fetch_all(server, folder, token=""):
    hub = Hub(server.address, "org/m", "main", token)
    commit, files = hub.listing()
    for one in files:
        assert hub.fetch(str(folder), commit, one, always)
        model_files.place_file(str(folder), one)
    return files


def same(source, folder, files):
    return all((source / one.path).read_bytes() == (Path(folder) / one.path).read_bytes() for one in files)


def test_a_repository_is_fetched_at_its_commit(hub_server, source, tmp_path):
    files = fetch_all(hub_server, tmp_path / "m")
    assert [one.path for one in files] == ["config.json", "model.safetensors", "more/notes.txt"]
    assert same(source, tmp_path / "m", files)
    assert all(COMMIT in path for path, _ in hub_server.asked[1:])


def test_a_broken_download_is_resumed_by_ranges(hub_server, source, tmp_path):
    hub_server.cut_after = 1500
    files = fetch_all(hub_server, tmp_path / "m")
    ranges = [headers["range"] for _path, headers in hub_server.asked if "range" in headers]
    assert ranges == ["bytes=1500-", "bytes=3000-"]
    assert same(source, tmp_path / "m", files)


def test_an_earlier_part_is_gone_on_with(hub_server, source, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors.part").write_bytes((source / "model.safetensors").read_bytes()[:700])
    files = fetch_all(hub_server, tmp_path / "m")
    assert "bytes=700-" in [headers.get("range") for _path, headers in hub_server.asked]
    assert same(source, tmp_path / "m", files)


def test_a_server_without_ranges_still_works(hub_server, source, tmp_path):
    hub_server.ranges = False
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors.part").write_bytes(b"x" * 700)
    files = fetch_all(hub_server, tmp_path / "m")
    assert same(source, tmp_path / "m", files)


@pytest.mark.parametrize("name", ["model.safetensors", "notes.txt"])
def test_altered_bytes_are_refused_by_sha256_or_git_id(hub_server, tmp_path, name):
    hub_server.wrong_bytes = name
    with pytest.raises(ModelError, match=rf"{name} (has sha256|differs from the git id)"):
        fetch_all(hub_server, tmp_path / "m")


def test_a_token_stays_with_its_host(hub_server, source, tmp_path):
    hub_server.token = "secret"
    hub_server.redirect = True
    files = fetch_all(hub_server, tmp_path / "m", token="secret")
    assert same(source, tmp_path / "m", files)
    sent = {path.startswith("/cdn/"): "authorization" in headers for path, headers in hub_server.asked}
    assert sent == {False: True, True: False}


def test_refusals_are_one_line(hub_server, tmp_path):
    hub_server.token = "secret"
    with pytest.raises(ModelError, match=r"refuses org/m@main \(HTTP 401\): a token"):
        Hub(hub_server.address, "org/m", "main").listing()
    with pytest.raises(ModelError, match=r"has no org/other@main \(HTTP 404\)"):
        Hub(hub_server.address, "org/other", "main", "secret").listing()


def test_a_hub_that_is_not_there_is_one_line(hub_server):
    address = hub_server.address
    hub_server.shutdown()
    hub_server.server_close()
    with pytest.raises(ModelError, match="does not answer: "):
        Hub(address, "org/m", "main").listing()


def test_time_that_is_over_leaves_a_part(hub_server, tmp_path):
    calls = iter([True, True, False])
    hub = Hub(hub_server.address, "org/m", "main")
    commit, files = hub.listing()
    hub_server.cut_after = 1000
    large = next(one for one in files if one.path == "model.safetensors")
    assert not hub.fetch(str(tmp_path), commit, large, lambda: next(calls, False))
    assert (tmp_path / "model.safetensors.part").exists()


@pytest.mark.parametrize("answer", [{}, [], {"sha": "1", "siblings": [{}]}, {"sha": "1", "siblings": 5}, None])
def test_an_answer_that_is_no_listing_is_refused(answer):
    with pytest.raises(ModelError, match="not a list of files"):
        parse_listing(answer)


def test_a_listing_cannot_name_a_file_elsewhere():
    with pytest.raises(ModelError, match="would leave its folder"):
        parse_listing({"sha": "1", "siblings": [{"rfilename": "../../etc/passwd", "size": 1}]})
