"""The launcher of llama.cpp, as far as it goes without the engine. Its drain is proved in molecule/model_service."""

from __future__ import annotations

import importlib.util
import socket
import sys
from pathlib import Path

import pytest

SERVE = Path(__file__).parents[3] / "roles" / "inference_engine" / "files" / "llama_cpp" / "serve.py"


@pytest.fixture(scope="module")
def serve():
    spec = importlib.util.spec_from_file_location("llama_cpp_serve", SERVE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("words", [[], ["--model", "/m", "--ctx", "5"], ["--model", "/m", "--port", "x"]])
def test_bad_arguments_end_with_2(serve, words):
    with pytest.raises(SystemExit) as end:
        serve.parse(words)
    assert end.value.code == 2


def test_a_release_is_read_line_by_line(serve, tmp_path):
    (tmp_path / "args").write_text("--model\n/a path/with blanks\n--port\n9000\n")
    options = serve.parse(serve.read_release(tmp_path))
    assert (options.model, options.port) == ("/a path/with blanks", 9000)


def test_a_release_without_arguments_ends_with_2(serve, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        serve.read_release(tmp_path)
    assert end.value.code == 2
    assert "args cannot be read: No such file or directory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["m.gguf", "config.json"], "m.gguf"),
        (["m-00002-of-00002.gguf", "m-00001-of-00002.gguf"], "m-00001-of-00002.gguf"),
        (["a.gguf", "b.gguf"], None),
        ([], None),
    ],
)
def test_the_model_in_a_folder(serve, tmp_path, names, chosen):
    for name in names:
        (tmp_path / name).write_text("")
    if chosen:
        assert serve.gguf_file(tmp_path) == tmp_path / chosen
    else:
        with pytest.raises(SystemExit):
            serve.gguf_file(tmp_path)


def test_busy_requests_are_those_that_run_and_those_that_wait(serve):
    text = (
        "# HELP x\nllamacpp:requests_processing 2\nllamacpp:requests_deferred 1\nllamacpp:tokens_predicted_total 900\n"
    )
    assert serve.busy_requests(text) == 3


def test_a_port_is_taken_away_and_open_connections_stay(serve):
    accepted = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted.append(listener.accept()[0])
        serve.stop_accepting("127.0.0.1", port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=2)
        accepted[0].sendall(b"still here")
        assert client.recv(100) == b"still here"
        assert serve.open_connections(port) == 1
        client.close()
        accepted[0].close()


def test_usage_is_told(serve, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["peerlane-serve", "--help"])
    assert serve.main() == 0
    monkeypatch.setattr(sys, "argv", ["peerlane-serve"])
    assert serve.main() == 2
    assert capsys.readouterr().out.count("usage: peerlane-serve RELEASE") == 2
