"""Processes: what start, drain and death look like from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import edit_config, make_llama
from tests.e2e.faults.server import FaultyServer
from tests.e2e.process_usage import descendants
from tests.e2e.serve import QuireServe, stream_lines

pytestmark = pytest.mark.long("operations")

LONG = {"prompt": "the quick", "max_tokens": 450, "ignore_eos": True, "temperature": 0}
JOIN_S = 240
"""Less than a test may take: a stream that does not end is seen."""
MANY = LONG | {"n": 64, "temperature": 1.0}
"""More than an endless server can finish while a test acts."""
SEVERAL = LONG | {"n": 24, "temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture
def server(checkpoint: Path) -> Iterator[QuireServe]:
    with QuireServe(str(checkpoint), "--port", "0") as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> Iterator[QuireServe]:
    """A server for tests that only look at it."""
    with QuireServe(str(checkpoint), "--port", "0") as server:
        yield server.wait_ready()


@pytest.fixture
def endless(checkpoint: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FaultyServer]:
    """A server that takes half a minute or more for MANY, in 1,800 steps that each take their time: what a test does
    once there is a first token happens to a stream, however late it is read here. A parameter is more flags."""
    flags = ("--port", "0", "--max-num-batched-tokens", "16", *getattr(request, "param", ()))
    with FaultyServer(tmp_path / "fault", str(checkpoint), *flags) as server, server.wait_ready().unhurried():
        yield server


class Reader(threading.Thread):
    """Reads one stream to its end, in the background."""

    def __init__(self, server: QuireServe, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._url, self._body = server.url + "/v1/completions", body
        self.lines: list[str] = []
        self.error: Exception | None = None
        self.started = threading.Event()
        self.start()
        assert self.started.wait(JOIN_S)

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json={**self._body, "stream": True}, timeout=JOIN_S) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.lines.append(line[6:])
                        self.started.set()
        except Exception as error:
            self.error = error
            self.started.set()


def texts_of(lines: Sequence[str]) -> list[str]:
    """By choice."""
    texts = [""] * 24
    for line in lines:
        if line != "[DONE]":
            (choice,) = json.loads(line)["choices"]
            texts[choice["index"]] += choice["text"]
    return texts


def test_settings_are_said_with_reasons_and_the_api_process_has_no_torch(shared: QuireServe) -> None:
    assert "context     512 tokens: the model's limit" in shared.log
    assert "dtype       float32: the checkpoint's" in shared.log
    shared.wait_line("try it")
    start = shared.log[: shared.log.index("try it")]
    assert len(start.splitlines()) <= 15, start
    logged = [line.split(maxsplit=2)[2] for line in start.splitlines() if line.startswith("INFO")]
    assert all(line.startswith(("Tool calls: ", "Reasoning: ")) for line in logged), "a library's own words"
    maps = Path(f"/proc/{shared.children()['api']}/maps").read_text()
    assert "libtorch" not in maps
    assert "libtorch" in Path(f"/proc/{shared.children()['engine']}/maps").read_text()


def test_the_api_process_does_not_interrupt_a_step_on_a_cpu(shared: QuireServe) -> None:
    """None of its threads that serve; the one that only waits for the parent's end is older."""
    api, engine = (shared.children()[name] for name in ("api", "engine"))
    threads = schedulers(api)
    waiting = [thread for thread, scheduler in threads.items() if scheduler != os.SCHED_BATCH]
    assert threads[api] == os.SCHED_BATCH
    assert len(waiting) <= 1 < len(threads)
    assert set(schedulers(engine).values()) == {os.SCHED_OTHER}


def schedulers(process: int) -> dict[int, int]:
    """By thread. Those that end meanwhile are left out."""
    found = {}
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            found[int(task.name)] = os.sched_getscheduler(int(task.name))
    return found


def test_sockets_are_private(shared: QuireServe) -> None:
    links = []
    for found in Path(f"/proc/{shared.children()['engine']}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(found))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "quire-" in line]
    unix = [line[-1] for line in lines if f"socket:[{line[6]}]" in links]  # other tests have servers too
    assert unix
    for path in unix:
        assert os.stat(Path(path).parent).st_mode & 0o077 == 0


def test_sigterm_drains_open_streams_refuses_new_ones_and_exits_0(checkpoint: Path, tmp_path: Path) -> None:
    with FaultyServer(tmp_path / "fault", str(checkpoint), "--port", "0") as server:
        server.wait_ready()
        undisturbed = texts_of(stream_lines(server.url + "/v1/completions", SEVERAL))
        engine = server.children()["engine"]
        with server.unhurried():  # the stream must not end before the engine is stopped
            reader = Reader(server, SEVERAL)
            os.kill(engine, signal.SIGSTOP)  # nor before the refusal is seen
        server.signal()
        while httpx.get(server.url + "/ready", timeout=20).status_code == 200:
            time.sleep(0.01)
        answer = server.post("/v1/completions", LONG | {"max_tokens": 1})
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
        assert "shutting down" in answer.json()["error"]["message"]
        with contextlib.suppress(ProcessLookupError):  # on a slow machine it counts as stuck by now, and was replaced
            os.kill(engine, signal.SIGCONT)
        reader.join(JOIN_S)
        assert reader.error is None
        assert reader.lines[-1] == "[DONE]"
        assert texts_of(reader.lines) == undisturbed
        assert server.wait() == 0
        assert server.last_line == "stopped"


def test_a_second_signal_ends_at_once_and_says_so(endless: FaultyServer) -> None:
    reader = Reader(endless, MANY)
    endless.signal(signal.SIGINT)
    endless.wait_line("SIGINT")
    endless.signal(signal.SIGTERM)
    assert endless.wait() == 128 + signal.SIGTERM
    assert "stopped at once by SIGTERM" in endless.last_line
    reader.join(JOIN_S)
    assert reader.lines[-1] != "[DONE]"


@pytest.mark.parametrize("endless", [["--shutdown-timeout", "0.2"]], indirect=True)
def test_open_requests_are_ended_when_the_drain_time_is_over(endless: FaultyServer) -> None:
    reader = Reader(endless, MANY)
    endless.signal()
    assert endless.wait() == 0
    reader.join(JOIN_S)
    assert "shutting down" in "".join(reader.lines)


def test_a_killed_engine_is_replaced_and_its_streams_go_on_also_during_a_drain(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Steps take their time until it is killed, so that it has streams then, however late they are read here."""
    flags = str(checkpoint), "--port", "0", "--shutdown-timeout", "120"
    with FaultyServer(tmp_path / "fault", *flags) as server:
        server.wait_ready()
        undisturbed = texts_of(stream_lines(server.url + "/v1/completions", SEVERAL))
        with server.unhurried():
            reader = Reader(server, SEVERAL)
            os.kill(server.children()["engine"], signal.SIGKILL)
        server.wait_line("engine process died: it was ended by SIGKILL")
        later = server.post("/v1/completions", LONG | {"max_tokens": 3})  # waits for the next engine
        assert later.json()["usage"]["completion_tokens"] == 3
        reader.join(JOIN_S)
        assert texts_of(reader.lines) == undisturbed
        server.wait_line("recovered in")
        metrics = httpx.get(server.url + "/metrics", timeout=60).text
        assert re.search(r'quire:process_restarts_total{.*process="engine"} 1.0', metrics)
        assert re.search(r"quire:sequences_replayed_total{.*} 24.0", metrics)

        with server.unhurried():
            reader = Reader(server, SEVERAL)
            server.signal()
            server.wait_line("SIGTERM")
            os.kill(server.children()["engine"], signal.SIGKILL)
        reader.join(JOIN_S)
        assert texts_of(reader.lines) == undisturbed
        assert server.wait() == 0, server.log
        assert server.last_line == "stopped"


def test_a_killed_api_process_is_replaced(endless: FaultyServer) -> None:
    reader = Reader(endless, MANY)
    os.kill(endless.children()["api"], signal.SIGKILL)
    reader.join(JOIN_S)
    assert isinstance(reader.error, httpx.TransportError)
    endless.clear()
    answer = endless.post("/v1/completions", LONG | {"max_tokens": 3})  # waits for the next one
    assert answer.json()["usage"]["completion_tokens"] == 3
    engine = endless.counts()["engine"]
    assert (engine["requests"], engine["free_blocks"]) == (0, engine["blocks"])
    assert 'process="api"} 1.0' in httpx.get(endless.url + "/metrics", timeout=60).text
    endless.signal()
    assert endless.wait() == 0


@pytest.mark.parametrize("endless", [["--max-restarts", "0"]], indirect=True)
def test_without_restarts_a_killed_engine_is_said_at_once_to_streams_and_operator(endless: FaultyServer) -> None:
    reader = Reader(endless, MANY)
    os.kill(endless.children()["engine"], signal.SIGKILL)
    reader.join(JOIN_S)
    assert json.loads(reader.lines[-2])["error"]["code"] == "engine_dead"
    assert reader.lines[-1] == "[DONE]"
    assert endless.wait() == 70
    assert "engine process died: it was ended by SIGKILL" in endless.last_line
    assert "see above" not in endless.log


def test_a_signal_to_all_processes_at_once_is_a_drain(checkpoint: Path, tmp_path: Path) -> None:
    structured = SEVERAL | {"structured_outputs": {"regex": "[a-z ]{400,450}"}, "n": 2, "ignore_eos": False}
    with FaultyServer(tmp_path / "fault", str(checkpoint), "--port", "0") as server:
        server.wait_ready()
        undisturbed = [texts_of(stream_lines(server.url + "/v1/completions", body)) for body in (SEVERAL, structured)]
        with server.unhurried():
            readers = [Reader(server, body) for body in (SEVERAL, structured)]
            processes = descendants(server.process.pid)
            assert len(processes) >= 4, "among them one that tries grammars"
            for pid in reversed(processes):
                os.kill(pid, signal.SIGTERM)
            assert all(reader.is_alive() for reader in readers), "they have ended before"
            server.wait_line("SIGTERM")
        assert_all_finish(server, readers, undisturbed)


def assert_all_finish(server: QuireServe, readers: list[Reader], undisturbed: list[list[str]]) -> None:
    """The streams that were open when it was told to stop go on as if nothing had happened, and then it stops."""
    for reader in readers:
        reader.join(JOIN_S)
    assert [texts_of(reader.lines) for reader in readers] == undisturbed
    assert server.wait() == 0, server.log
    assert server.last_line == "stopped"


def test_children_leave_with_a_killed_supervisor(server: QuireServe) -> None:
    children = server.children()
    assert set(children) == {"engine", "api"}
    server.process.kill()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in children.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in children.values())


def test_a_signal_during_the_start_is_an_orderly_end(checkpoint: Path) -> None:
    with QuireServe(str(checkpoint), "--port", "0") as server:
        server.wait_line("access")
        server.signal()
        assert server.wait() == 0, server.log
        assert server.last_line == "stopped"


def broken(tmp_path: Path, checkpoint: Path, change: dict[str, Any]) -> str:
    copy = tmp_path / "broken"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    edit_config(copy, change)
    return str(copy)


@pytest.mark.parametrize(
    ("change", "arguments", "code", "message"),
    [
        ({"vocab_size": 640}, [], 4, "expected"),
        ({"architectures": ["FluxCapacitor"]}, [], 4, "FluxCapacitor"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, [], 4, "spiral"),
        ({"quantization_config": {"quant_method": "flux"}}, [], 4, "flux"),
        ({}, ["--max-model-len", "9999"], 2, "--max-model-len 9999"),
        ({}, ["--kv-cache-memory-bytes", "10"], 5, "--kv-cache-memory-bytes 10"),
        ({}, ["--num-gpu-blocks-override", "1000000000"], 5, "--num-gpu-blocks-override"),
        ({}, ["--decode-context-parallel-size", "2"], 2, "--decode-context-parallel-size 2 is not supported"),
        ({}, ["--tensor-parallel-size", "3"], 2, "can be divided over 1, 2, 4 ranks"),
        ({}, ["--no-such-flag"], 2, "no-such-flag"),
        ({}, ["--api-key"], 2, "--api-key has no key"),
        ({}, ["--api-key", ""], 2, "--api-key is empty"),
        ({}, ["--host", "203.0.113.1"], 2, "--host"),
        ({}, ["--chat-template", "/no/such/file"], 2, "--chat-template"),
        ({}, ["--override-generation-config", '{"warmth": 1}'], 2, "warmth"),
    ],
)
def test_what_cannot_start_says_why_in_its_last_line(
    tmp_path: Path, checkpoint: Path, change: dict[str, Any], arguments: list[str], code: int, message: str
) -> None:
    with QuireServe(broken(tmp_path, checkpoint, change), "--port", "0", *arguments) as server:
        assert server.wait() == code, server.log
        last = server.last_line
        assert message in (server.log if "no-such-flag" in message else last)
        assert "Traceback" not in server.log


def test_a_missing_model_and_a_taken_port_have_codes_of_their_own(tmp_path: Path, checkpoint: Path) -> None:
    with QuireServe(str(tmp_path / "nothing"), "--port", "0") as server:
        assert server.wait() == 3
        assert str(tmp_path / "nothing") in server.last_line
    taken = socket.create_server(("0.0.0.0", 0))
    with taken, QuireServe(str(checkpoint), "--port", str(taken.getsockname()[1])) as server:
        assert server.wait() == 6
        assert "is taken by another program" in server.last_line


def test_a_truncated_weights_file_is_named(tmp_path: Path, checkpoint: Path) -> None:
    directory = Path(broken(tmp_path, checkpoint, {}))
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with QuireServe(str(directory), "--port", "0") as server:
        assert server.wait() == 4
        assert "model.safetensors" in server.last_line


def test_what_an_engine_has_computed_outlives_it(checkpoint: Path) -> None:
    """Its successor loads the blocks from the host, though none had left the device."""
    body = {"prompt": list(range(3, 93)), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    flags = "--port", "0", "--dtype", "float32", "--kv-offloading-size", "0.01", "--block-size", "8"
    with QuireServe(str(checkpoint), *flags) as server:
        server.wait_ready()
        before = server.post("/v1/completions", body).json()
        deadline = time.monotonic() + JOIN_S
        while not re.search(r"kv_offload_blocks{.*} 1[12].0", httpx.get(server.url + "/metrics", timeout=60).text):
            assert time.monotonic() < deadline, server.log  # the engine is idle, and soon copies the last ones
            time.sleep(0.05)
        os.kill(server.children()["engine"], signal.SIGKILL)
        server.wait_line("engine process died: it was ended by SIGKILL")
        after = server.post("/v1/completions", body).json()  # waits for the next engine
        assert after["choices"][0]["text"] == before["choices"][0]["text"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= 80
        metrics = httpx.get(server.url + "/metrics", timeout=60).text
        assert re.search(r"vllm:external_prefix_cache_hits_total{.*} 8\d.0", metrics), metrics
        server.signal()
        assert server.wait() == 0


def test_what_was_computed_is_on_disk_after_a_restart(checkpoint: Path, tmp_path: Path) -> None:
    """Whether it pays to load it is another question: either way the answer is the same."""
    body = {"prompt": list(range(3, 93)), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    flags = ("--port", "0", "--dtype", "float32", "--kv-offloading-size", "0.01", "--block-size", "8",
             "--kv-disk-path", str(tmp_path / "disk"), "--kv-disk-size", "0.01")  # fmt: skip
    texts = []
    for life in range(2):
        with QuireServe(str(checkpoint), *flags) as server:
            server.wait_ready()
            if life:
                assert re.search(r"disk tier   1[12] blocks of .* found", server.log), server.log
            texts.append(server.post("/v1/completions", body).json()["choices"][0]["text"])
            deadline = time.monotonic() + JOIN_S
            used = r'kv_disk_blocks{.*state="used"} 1[12].0'
            while not re.search(used, httpx.get(server.url + "/metrics", timeout=60).text):
                assert time.monotonic() < deadline, server.log
                time.sleep(0.05)
            server.signal()
            assert server.wait() == 0
    assert texts[0] == texts[1]
