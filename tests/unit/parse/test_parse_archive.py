"""Archives: what can be read is read, and what is hostile, cut or too large is one clear line."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import tarfile
import zipfile

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core import evidence
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.evidence import Content, Evidence, EvidenceSet
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import archive, intake

TOPO = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-7\nGPU1\tPHB\t X \t0-7\n"
LIST = "GPU 0: NVIDIA A30 (UUID: GPU-1)\n"


def tar_bytes(members: dict[str, str | tarfile.TarInfo]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as stream:
        for name, given in members.items():
            info = given if isinstance(given, tarfile.TarInfo) else tarfile.TarInfo(name)
            data = given.encode() if isinstance(given, str) else b""
            info.size = len(data)
            stream.addfile(info, io.BytesIO(data))
    return out.getvalue()


def zip_bytes(members: dict[str, str], stored: bool = False) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED) as stream:
        for name, text in members.items():
            stream.writestr(name, text)
    return out.getvalue()


@pytest.fixture
def judged(tmp_path):
    """Return a function: bytes of a file to its hosts (name -> sources) and the complaints."""

    def read(name: str, data: bytes) -> tuple[dict[str, set[str]], list[str]]:
        place = tmp_path / name
        place.write_bytes(data)
        problems: list[str] = []
        try:
            hosts = intake.read([place], problems=problems)
        except InputError as error:
            return {}, error.line().splitlines()
        return {host.host: set(host.entries) for host in hosts}, [line.replace(f"{tmp_path}/", "") for line in problems]

    return read


FILES = {"node1/topo.txt": TOPO, "node1/list.txt": LIST, "node2/topo.txt": TOPO}
HOSTS = {"node1": {"nvidia_smi.topo_m", "nvidia_smi.L"}, "node2": {"nvidia_smi.topo_m"}}


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.tar", tar_bytes(FILES)),
        ("a.tar.gz", gzip.compress(tar_bytes(FILES))),
        ("a.tgz", gzip.compress(tar_bytes(FILES))),
        ("a.tar.xz", lzma.compress(tar_bytes(FILES))),
        ("a.tar.bz2", bz2.compress(tar_bytes(FILES))),
        ("a.zip", zip_bytes(FILES)),
        ("without-a-suffix", gzip.compress(tar_bytes(FILES))),
    ],
)
def test_each_kind_of_archive_is_read(judged, name, data):
    assert judged(name, data) == (HOSTS, [])


def test_a_compressed_file_is_read_as_a_file(judged):
    assert judged("topo.txt.gz", gzip.compress(TOPO.encode())) == ({"topo": {"nvidia_smi.topo_m"}}, [])


def test_files_at_the_top_of_an_archive_are_a_host_named_after_it(judged):
    assert judged("box.tar.gz", gzip.compress(tar_bytes({"topo.txt": TOPO}))) == ({"box": {"nvidia_smi.topo_m"}}, [])


def test_a_packed_snapshot_is_the_same_as_its_folder(tmp_path):
    given = EvidenceSet("gpu1", "2026-01-02T03:04:05Z", True, {"uname": Evidence("uname", "Linux\r\n", rc=0)})
    evidence.save(given, tmp_path / "snap" / "gpu1")
    with tarfile.open(tmp_path / "snap.tar.gz", "w:gz") as stream:
        stream.add(tmp_path / "snap", "snap")

    assert intake.read([tmp_path / "snap.tar.gz"]) == intake.read([tmp_path / "snap"]) == [given]


def test_archives_in_a_folder_are_its_hosts(tmp_path):
    (tmp_path / "node1.tar.gz").write_bytes(gzip.compress(tar_bytes({"topo.txt": TOPO})))
    (tmp_path / "node2.zip").write_bytes(zip_bytes({"topo.txt": TOPO}))

    assert [host.host for host in intake.read([tmp_path])] == ["node1", "node2"]


def test_an_archive_on_standard_input_is_read():
    data = gzip.compress(tar_bytes(FILES))

    hosts = intake.read([], stdin=Content(data, size=len(data)))

    assert {host.host: set(host.entries) for host in hosts} == HOSTS


def _special(kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, target
    return info


def _named(name: str, info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.name = name
    return info


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"../../etc/evil": TOPO}, "leaves the archive, and is left out: ../../etc/evil"),
        ({"node1/../../evil": TOPO}, "leaves the archive, and is left out: node1/../../evil"),
        ({"/etc/evil": TOPO}, "leaves the archive, and is left out: /etc/evil"),
        ({"C:\\evil": TOPO}, "leaves the archive, and is left out: C:/evil"),
        (
            {"l": _named("node1/out", _special(tarfile.SYMTYPE, "/etc/shadow"))},
            "is a link, and is left out: node1/out",
        ),
        ({"l": _named("node1/hard", _special(tarfile.LNKTYPE, "../x"))}, "is a link, and is left out: node1/hard"),
        ({"l": _named("node1/dev", _special(tarfile.CHRTYPE))}, "is a device or a pipe, and is left out: node1/dev"),
        ({"l": _named("node1/pipe", _special(tarfile.FIFOTYPE))}, "is a device or a pipe, and is left out: node1/pipe"),
    ],
)
def test_what_leaves_a_tar_is_left_out_and_the_rest_is_judged(judged, tmp_path, bad, said):
    hosts, problems = judged("a.tar.gz", gzip.compress(tar_bytes({**bad, **FILES})))

    assert hosts == HOSTS
    assert problems == [f"a.tar.gz: {said}"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


def test_what_leaves_a_zip_is_left_out_and_the_rest_is_judged(judged):
    out = io.BytesIO(zip_bytes({**FILES, "../evil": TOPO}))
    with zipfile.ZipFile(out, "a") as stream:
        link = zipfile.ZipInfo("node1/link")
        link.external_attr = 0o120777 << 16
        stream.writestr(link, "/etc/shadow")
    hosts, problems = judged("a.zip", out.getvalue())

    assert hosts == HOSTS
    assert problems == [
        "a.zip: leaves the archive, and is left out: ../evil",
        "a.zip: is a link, and is left out: node1/link",
    ]


def _varied(count: int) -> dict[str, str]:
    """Files that don't compress to nothing, so that a cut lands inside one."""
    rows = [[f"[{at:12.6f}] pci: {at * 7919 * (n + 3) % 100003}\n" for at in range(20000)] for n in range(count)]
    return {"node1/topo.txt": TOPO, **{f"node1/dmesg{n}.txt": "".join(rows[n]) for n in range(count)}}


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "tar.xz", "tar.bz2", "zip", "stored.zip"])
def test_of_a_cut_archive_what_could_be_read_is_judged(judged, kind):
    files = _varied(6)
    data = zip_bytes(files, kind == "stored.zip") if kind.endswith("zip") else tar_bytes(files)
    pack = {"tar.gz": gzip.compress, "tar.xz": lzma.compress, "tar.bz2": bz2.compress}.get(kind, lambda one: one)
    packed = pack(data)

    hosts, problems = judged(f"a.{kind}", packed[: len(packed) // 2])

    assert {"nvidia_smi.topo_m", "kernel_log"} <= hosts["node1"]
    assert len(problems) == 1
    assert "is cut or broken (" in problems[0]
    assert problems[0].endswith("what could be read is judged")


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
def test_no_cut_of_an_archive_is_a_traceback(judged, kind):
    data = zip_bytes(FILES) if kind == "zip" else tar_bytes(FILES)
    packed = gzip.compress(data) if kind == "tar.gz" else data
    for size in range(0, len(packed), max(len(packed) // 150, 1)):
        hosts, problems = judged(f"a.{kind}", packed[:size])
        assert problems or hosts == HOSTS, size  # behind its last file, an archive may be cut without loss
        assert set(hosts) <= set(HOSTS)


def test_a_zip_bomb_is_ended_early_and_what_came_before_is_judged(judged, monkeypatch):
    monkeypatch.setattr(archive, "_RATIO_FROM_BYTES", 1024 * 1024)
    zeros = "\0" * (20 * 1024 * 1024)
    for name, data in (
        ("a.zip", zip_bytes({"node1/topo.txt": TOPO, "node1/zeros": zeros})),
        ("a.tar.gz", gzip.compress(tar_bytes({"node1/topo.txt": TOPO, "node1/zeros": zeros}))),
    ):
        hosts, problems = judged(name, data)

        assert hosts == {"node1": {"nvidia_smi.topo_m"}}
        assert problems == [
            f"{name}: unpacks to more than 200 times its size, as a zip bomb does; only what came before is judged"
        ]


@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        ("MAX_UNPACKED_BYTES", 2 * 1024 * 1024, "unpacks to more than 2 MiB"),
        ("MAX_KEPT_BYTES", 1024 * 1024, "holds more than 1 MiB of text"),
        ("MAX_MEMBERS", 3, "holds more than 3 files"),
    ],
)
def test_the_limits_hold(judged, monkeypatch, limit, value, said):
    monkeypatch.setattr(archive, limit, value)

    hosts, problems = judged("a.tar", tar_bytes(_varied(6)))

    assert "nvidia_smi.topo_m" in hosts["node1"]
    assert problems == [f"a.tar: {said}; only what came before is judged"]


def test_a_file_with_holes_is_left_out(judged):
    info = tarfile.TarInfo("node1/holes")
    info.type = tarfile.GNUTYPE_SPARSE
    hosts, problems = judged("a.tar", tar_bytes({"node1/topo.txt": TOPO, "x": info}))

    assert hosts == {"node1": {"nvidia_smi.topo_m"}}
    assert problems == ["a.tar: is a file with holes, and is left out: node1/holes"]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.tar.gz", gzip.compress(tar_bytes({})), "is an empty archive"),
        ("a.zip", zip_bytes({}), "is an empty archive"),
        ("a.tar.zst", b"\x28\xb5\x2f\xfd" + bytes(20), "zstd|cut or broken"),
        ("a.tar", tar_bytes({"note.txt": "hello"}), "holds nothing that Peerlane knows"),
    ],
    ids=["tar.gz", "zip", "zst", "no-output"],
)
def test_nothing_to_judge_is_one_line(judged, name, data, said):
    hosts, problems = judged(name, data)

    assert (hosts, len(problems)) == ({}, 1)
    assert re.search(said, problems[0])


def test_an_archive_in_an_archive_is_named(judged):
    inner = gzip.compress(tar_bytes(FILES)).decode("latin-1")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as stream:
        stream.writestr("node1/topo.txt", TOPO)
        stream.writestr("node1/inner.tar.gz", inner.encode("latin-1"))
    hosts, problems = judged("a.zip", out.getvalue())

    assert hosts == {"node1": {"nvidia_smi.topo_m"}}
    assert problems == ["a.zip/node1/inner.tar.gz: is an archive in an archive; unpack the outer one first"]
