"""The version matrix against hosts: which release fits, or what must change first."""

from __future__ import annotations

import pytest
import yaml

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.gpu_generation import compute_capability
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import engine_matrix, engines
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model.engine_matrix import Host


def facts(pci_id="10de:2bb5", driver="580.95.05", count=2):
    return {"gpus": [{"pci_id": pci_id, "name": "GPU"}] * count, "driver": {"version": driver}}


def test_each_figure_of_the_matrix_says_where_it_comes_from():
    for engine in engine_matrix.engines():
        for one in engine_matrix.builds(engine):
            figures = ("python", "torch", "cuda", "driver_branch", "nccl", "flashinfer", "sm", "glibc", "cpu_flags")
            given = {name for name in figures if getattr(one, name)}
            assert given <= set(one.sources), f"{one.name}: {given - set(one.sources)}"
            assert one.pythons()


def test_cuda_builds_are_complete_and_others_name_no_gpu():
    for engine in engine_matrix.engines():
        for one in engine_matrix.builds(engine):
            assert bool(one.cuda) == bool(one.driver_branch) == bool(one.sm) == bool(one.nccl), one.name


def test_every_engine_with_a_lock_is_in_the_matrix_in_that_version():
    for one in engines.ENGINES.values():
        for version in one.versions:
            assert engine_matrix.build(one.name, version).version == version


@pytest.mark.parametrize(
    ("engine", "os_version", "expected"),
    [("vllm", "12", "3.11"), ("sglang", "13", "3.13"), ("vllm", "13", "3.13"), ("llama_cpp", "12", "3.11")],
)
def test_a_host_that_fits_gets_release_and_python(engine, os_version, expected):
    choice = engine_matrix.choose(engine, engine_matrix.host(facts(), "debian", os_version))

    assert choice.build is engine_matrix.builds(engine)[0]
    assert choice.python == expected
    assert choice.obstacles == ()


@pytest.mark.parametrize(
    ("engine", "given", "system", "said"),
    [
        ("vllm", facts(driver="570.86.10"), ("debian", "13"), "driver branch 570 is too old"),
        ("vllm", facts(driver="570.86.10"), ("debian", "13"), "set nvidia_driver_branch to 580"),
        ("sglang", facts("10de:1db6"), ("debian", "13"), "GPU is SM 70, too old"),
        ("sglang", facts("10de:1eb8"), ("debian", "13"), "GPU is SM 75, too old"),
        ("vllm", facts("10de:1b38"), ("debian", "13"), "GPU is SM 61, too old"),
        ("vllm", facts(), ("ubuntu", "22.04"), "Python 3.10 is too old: vllm 0.33.0 needs 3.11 to 3.14"),
        ("sglang", facts(), ("ubuntu", "22.04"), "sglang 0.5.23 needs 3.11 to 3.13"),
    ],
)
def test_what_must_change_is_said_in_one_line(engine, given, system, said):
    choice = engine_matrix.choose(engine, engine_matrix.host(given, *system))

    assert choice.build is None
    assert any(said in line for line in choice.obstacles), choice.obstacles
    assert all("\n" not in line for line in choice.obstacles)


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (Host(driver_branch=0, sms=(90,), glibc="2.36", pythons=("3.12",)), "no NVIDIA driver runs"),
        (Host(driver_branch=580, sms=(90,), glibc="2.28", pythons=("3.12",)), "glibc 2.28 is too old"),
        (Host(driver_branch=580, sms=(90,), glibc="2.36", pythons=("3.14",)), "Python 3.14 is none that it has wheels"),
        (Host(driver_branch=580, sms=(110,), glibc="2.36", pythons=("3.12",)), "which sglang 0.5.23 was not built for"),
    ],
)
def test_obstacles_of_sglang(here, said):
    choice = engine_matrix.choose("sglang", here)

    assert choice.build is None
    assert len(choice.obstacles) == 1
    assert said in choice.obstacles[0]


def test_a_host_without_a_driver_is_told_from_one_whose_driver_was_not_read():
    none = {"gpus": facts()["gpus"], "driver": {"version": None, "state": "no_driver"}}

    assert engine_matrix.host(none).driver_branch == 0
    unread = {"gpus": facts()["gpus"], "driver": {"version": None, "state": None}}
    assert engine_matrix.host(unread).driver_branch is None


def test_what_the_audit_does_not_know_is_unknown_and_no_obstacle():
    choice = engine_matrix.choose("vllm", Host())

    assert choice.build is not None
    assert choice.python == ""
    assert len(choice.unknown) == 4
    assert choice.obstacles == ()


def test_a_gpu_newer_than_the_table_is_unknown():
    choice = engine_matrix.choose("vllm", engine_matrix.host(facts("10de:3f00"), "debian", "13"))

    assert choice.build is not None
    assert "the architecture of GPU is not known" in choice.unknown[0]


@pytest.mark.parametrize(
    ("engine", "sm", "served"),
    [
        ("vllm", 75, True),
        ("vllm", 86, True),
        ("vllm", 87, True),
        ("vllm", 103, True),
        ("vllm", 121, True),
        ("vllm", 70, False),
        ("vllm", 110, False),
        ("vllm", 130, None),
        ("sglang", 86, True),
        ("sglang", 75, False),
    ],
)
def test_machine_code_runs_within_a_major_architecture(engine, sm, served):
    assert engine_matrix.build(engine).serves(sm) is served


@pytest.mark.parametrize(
    ("version", "said"),
    [("0.99.0", "vllm 0.99.0 is not in the version matrix; it has 0.33.0"), ("latest", "is not in the version")],
)
def test_a_version_that_does_not_exist(version, said):
    with pytest.raises(InputError) as caught:
        engine_matrix.choose("vllm", Host(), version)

    assert said in caught.value.line()


def test_an_engine_that_does_not_exist():
    with pytest.raises(InputError, match="'tgi' is not in the version matrix"):
        engine_matrix.choose("tgi", Host())


@pytest.mark.parametrize(
    ("what", "toolkit", "sms", "expected"),
    [
        ("flashinfer", "12.8", [120], ["flashinfer-sm120-old-nvcc", "other-cuda-major"]),
        ("flashinfer", "12.9", [120], ["other-cuda-major"]),
        ("flashinfer", "13.0", [120], []),
        ("flashinfer", "12.6", [120], ["flashinfer-sm120-old-nvcc", "blackwell-old-nvcc", "other-cuda-major"]),
        ("flash_attention", "13.0", [90], []),
        ("flash_attention_3", "13.0", [120], ["flash-attention-3-other-gpu"]),
        ("flash_attention_3", "13.0", [90], []),
        ("deep_gemm", "13.0", [120], ["deep-gemm-sm120"]),
        ("deep_gemm", "13.0", [80], ["deep-gemm-old-gpu"]),
        ("deep_gemm", "13.0", [90], []),
        ("flash_mla", "13.0", [121], ["flash-mla-other-gpu"]),
        ("flash_attention", "13.0", [70], ["old-gpu-new-nvcc"]),
    ],
)
def test_known_bad_builds_are_named_before_the_build(what, toolkit, sms, expected):
    found = engine_matrix.bad_builds(what, toolkit, sms, "13.0")

    assert [one.id for one in found] == expected
    assert all(one.source and "; " in one.line() for one in found)


def test_a_build_of_something_unknown():
    with pytest.raises(InputError, match="nothing is known about building 'apex'"):
        engine_matrix.bad_builds("apex", "13.0", [90], "13.0")


@pytest.mark.parametrize(
    ("memory_gib", "cores", "jobs"), [(96, 64, "4"), (24, 64, "1"), (8, 64, "1"), (512, 8, "8"), (512, 64, "21")]
)
def test_jobs_follow_from_memory(memory_gib, cores, jobs):
    made = engine_matrix.build_environment("flash_attention", [120, 90, 120], memory_gib, cores)

    assert made == {"TORCH_CUDA_ARCH_LIST": "9.0a;12.0a", "MAX_JOBS": jobs}


@pytest.mark.parametrize(
    ("device", "sm"),
    [
        ("1db6", 70),
        ("1eb8", 75),
        ("20b2", 80),
        ("2204", 86),
        ("2684", 89),
        ("26b9", 89),
        ("2330", 90),
        ("2901", 100),
        ("3182", 103),
        ("2bb5", 120),
        ("2b85", 120),
        ("2e12", 121),
        ("4000", None),
    ],
)
def test_compute_capability_from_the_device_id(device, sm):
    assert compute_capability(int(device, 16)) == sm


def test_the_listed_gpus_all_have_one():
    models = yaml.safe_load((engine_matrix._FILE.parents[1] / "rules/gpus.yml").read_text())["models"]

    assert [device for device in models if compute_capability(int(device, 16)) is None] == []
