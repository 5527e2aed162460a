"""`expertide pull` against a hub on this machine that breaks connections, lies, and hangs."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from expertide.errors import RequestError
from expertide.hub import names
from expertide.hub.names import Candidate, HubName, RemoteFile
from expertide.prepare import model_path

REPO = "tide/pool"
BIG = random.Random(5).randbytes(3 << 20)


class StubHub(http.server.ThreadingHTTPServer):
    """Serves one repository.

    Attributes:
        files: path -> what is sent; `promised` overrides size and SHA-256 of a path.
        break_after: connections end after so many bytes of a body, as often as the list is long.
        hang_at: bodies stop at this byte of the file and hang; `hangs` is set then.
        ranges: False: ranges are ignored, the whole file is sent.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.promised: dict[str, tuple[int, str]] = {}
        self.break_after: list[int] = []
        self.hang_at: int | None = None
        self.hangs = threading.Event()
        self.ranges = True
        self.sent_bytes = 0
        self.tokens: set[str | None] = set()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is part of the test."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: StubHub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if REPO in path:
            self.server.tokens.add(self.headers.get("Authorization"))
        if path == f"/api/models/{REPO}":
            self._answer(json.dumps({"id": REPO, "sha": "c0ffee", "siblings": self._siblings()}).encode())
        elif path.startswith(f"/{REPO}/resolve/c0ffee/"):
            self._file(self.server.files[path.removeprefix(f"/{REPO}/resolve/c0ffee/")])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _siblings(self) -> list[dict[str, Any]]:
        found = []
        for path, data in self.server.files.items():
            size, sha = self.server.promised.get(path, (len(data), hashlib.sha256(data).hexdigest()))
            found.append({"rfilename": path, "size": size, "lfs": {"size": size, "sha256": sha, "pointerSize": 1}})
        return found

    def _answer(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _file(self, data: bytes) -> None:
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        start, end = (int(first), int(last or len(data) - 1) + 1) if self.server.ranges else (0, len(data))
        body = data[start:end]
        self.send_response(206 if self.server.ranges else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.end_headers()
        if self.server.break_after:
            body = body[: self.server.break_after.pop(0)]
        hang_at = self.server.hang_at
        if hang_at is not None and start <= hang_at < end:
            body = body[: hang_at - start]
        self.wfile.write(body)
        self.server.sent_bytes += len(body)
        if hang_at is not None and start <= hang_at < end:
            self.wfile.flush()
            self.server.hangs.set()
            self.rfile.read(1)  # until the client is gone
        self.close_connection = True


@pytest.fixture
def hub() -> Iterator[StubHub]:
    with StubHub() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()


def start(hub: StubHub, cache: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("EXPERTIDE_", "HF_"))}
    environment |= {"HF_ENDPOINT": hub.endpoint, "XDG_CACHE_HOME": str(cache), "HF_HOME": str(cache / "hf"), **env}
    return subprocess.Popen(
        [sys.executable, "-m", "expertide", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def run(hub: StubHub, cache: Path, *arguments: str, **env: str) -> tuple[int, str, str]:
    process = start(hub, cache, *arguments, **env)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    return process.returncode, out, err


def folder(cache: Path) -> Path:
    return cache / "expertide" / "models" / "tide--pool"


def test_a_split_model_that_is_killed_at_five_points_goes_on_and_ends_whole(hub: StubHub, tmp_path: Path):
    half = len(BIG) // 2
    hub.files = {"q/big-Q8_0-00001-of-00002.gguf": BIG[:half], "q/big-Q8_0-00002-of-00002.gguf": BIG[half:]}
    for hang_at in (1, half // 3, half // 2, half - 5, half - 1):
        hub.hang_at = hang_at
        hub.hangs.clear()
        process = start(hub, tmp_path, "pull", REPO)
        assert hub.hangs.wait(30)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not list(folder(tmp_path).rglob("*00002*.gguf"))
    hub.hang_at = None
    code, _, err = run(hub, tmp_path, "pull", REPO)
    assert code == 0, err
    for path, data in hub.files.items():
        assert (folder(tmp_path) / path).read_bytes() == data
    assert not list(folder(tmp_path).rglob("*.part"))
    # Next to nothing came twice: at each kill at most what the sockets held.
    assert hub.sent_bytes < len(BIG) + 5 * (1 << 20)
    before = hub.sent_bytes
    assert run(hub, tmp_path, "pull", REPO)[0] == 0 and hub.sent_bytes == before


@pytest.mark.parametrize("ranges", [True, False])
def test_connections_that_break_are_taken_up_again(hub: StubHub, tmp_path: Path, ranges: bool):
    hub.files = {"big-Q8_0.gguf": BIG}
    hub.ranges = ranges
    hub.break_after = [1000, 0, 1 << 20]
    code, _, err = run(hub, tmp_path, "pull", REPO, HF_TOKEN="hf_secret")
    assert code == 0, err
    assert (folder(tmp_path) / "big-Q8_0.gguf").read_bytes() == BIG
    assert hub.tokens == {"Bearer hf_secret"}


def test_a_flipped_byte_is_caught_and_the_file_is_refused(hub: StubHub, tmp_path: Path):
    hub.files = {"big-Q8_0.gguf": BIG[:-1] + bytes([BIG[-1] ^ 1])}
    hub.promised = {"big-Q8_0.gguf": (len(BIG), hashlib.sha256(BIG).hexdigest())}
    code, _, err = run(hub, tmp_path, "pull", REPO)
    assert code == 1 and "other bytes arrived than the hub promises" in err
    assert not any(path.is_file() for path in folder(tmp_path).rglob("*"))
    code, _, err = run(hub, tmp_path, "run", REPO, "-p", "x")
    assert code == 1 and f"`expertide pull {REPO}` gets it" in err


def test_a_hub_that_lies_about_a_size_ends_in_a_sentence(hub: StubHub, tmp_path: Path, monkeypatch: Any):
    from expertide.errors import StorageError
    from expertide.hub.download import Hub

    hub.files = {"a-Q8_0.gguf": BIG[:1000]}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.endpoint)
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", hub.endpoint)
    for size, pattern in ((2000, r"got 1,000 of 2,000 bytes"), (500, "sends more than it promises")):
        hub.promised = {"a-Q8_0.gguf": (size, "0" * 64)}
        source = Hub(REPO, wait_s=0)
        with pytest.raises(StorageError, match=pattern):
            source.fetch(names.candidates(source.files)[0], lambda *_: None)


def test_a_disk_without_room_is_refused_before_anything_is_read(hub: StubHub, tmp_path: Path):
    hub.files = {"a-Q8_0.gguf": b"x"}
    hub.promised = {"a-Q8_0.gguf": (1 << 60, "0" * 64)}
    code, _, err = run(hub, tmp_path, "pull", REPO)
    assert code == 1 and "are missing" in err and "free" in err
    assert hub.sent_bytes == 0


def test_of_several_quants_the_plan_chooses_and_says_why_and_the_model_runs_by_its_name(hub: StubHub, tmp_path: Path):
    demo = model_path("demo").read_bytes()
    hub.files = {"m-Q2_K.gguf": b"GGUF" + bytes(100), "m-Q4_K_M.gguf": demo, "m-Q8_0.gguf": demo, "README.md": b"hi"}
    code, _, err = run(hub, tmp_path, "pull", REPO, "--ram", "1GiB")
    assert code == 0 and "taking Q4_K_M (15.8 MiB): fits into 1.00 GiB, 100 % of the experts in RAM" in err
    assert sorted(path.name for path in folder(tmp_path).iterdir()) == ["m-Q4_K_M.gguf"]
    code, out, err = run(hub, tmp_path, "run", REPO, "-p", "What is the capital of France?", "-n", "12")
    assert code == 0 and "Paris" in out
    assert run(hub, tmp_path, "pull", f"{REPO}:q8_0")[0] == 0
    code, _, err = run(hub, tmp_path, "inspect", REPO)
    assert code == 1 and f"several are here: {REPO}:Q4_K_M, {REPO}:Q8_0" in err
    code, out, _ = run(hub, tmp_path, "list")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["demo", f"{REPO}:Q4_K_M", f"{REPO}:Q8_0"]
    assert all("deepseek2" in line and "fits" in line for line in lines)
    code, out, _ = run(hub, tmp_path, "list", "--json", "-")
    assert [entry["fits"] for entry in json.loads(out)["models"]] == [True] * 3


@pytest.mark.parametrize(
    ("arguments", "code", "pattern"),
    [
        (["pull", "no-slash"], 2, "expected ORG/NAME"),
        (["pull", "tide/nothing"], 1, "no such model on the hub"),
        (["pull", f"{REPO}:Q9"], 1, "there are Q8_0"),
        (["pull", REPO, "--ram", "lots"], 2, "--ram"),
    ],
)
def test_what_cannot_be_pulled_is_refused_in_a_line(
    hub: StubHub, tmp_path: Path, arguments: list[str], code: int, pattern: str
):
    hub.files = {"big-Q8_0.gguf": BIG}
    found, _, err = run(hub, tmp_path, *arguments)
    assert found == code and pattern in err
    assert 1 <= len(err.strip().splitlines()) <= 3


def test_offline_nothing_is_asked_and_a_hub_that_is_away_is_named(hub: StubHub, tmp_path: Path):
    code, _, err = run(hub, tmp_path, "pull", REPO, HF_HUB_OFFLINE="1")
    assert code == 1 and "the hub cannot be asked" in err and not hub.tokens
    code, _, err = run(hub, tmp_path, "pull", REPO, HF_ENDPOINT="http://127.0.0.1:9")
    assert code == 1 and "the hub cannot be asked" in err


@pytest.mark.parametrize(
    ("path", "quant"),
    [
        ("a/Qwen3-30B-A3B-Q4_K_M.gguf", "Q4_K_M"),
        ("model.q4_0.gguf", "Q4_0"),
        ("UD-Q4_K_XL/x-UD-Q4_K_XL-00001-of-00003.gguf", "UD-Q4_K_XL"),
        ("x-IQ4_XS.gguf", "IQ4_XS"),
        ("x-BF16.gguf", "BF16"),
        ("gpt-oss-mxfp4.gguf", "MXFP4"),
        ("model.gguf", ""),
    ],
)
def test_the_quant_is_read_from_the_files_name(path: str, quant: str):
    assert names.quant_of(path) == quant


def test_split_sets_are_taken_whole_or_not_at_all():
    files = [RemoteFile(f"a-Q4_0-0000{n}-of-00003.gguf", 10, None) for n in (3, 1, 2)]
    files += [RemoteFile("b-Q8_0-00001-of-00002.gguf", 1, None), RemoteFile("mmproj-F16.gguf", 1, None)]
    (found,) = names.candidates(files)
    assert found == Candidate("Q4_0", (files[1], files[2], files[0])) and found.num_bytes == 30
    assert names.select(HubName("a/b", "a-Q4_0-00002-of-00003.gguf"), [found]) == [found]
    with pytest.raises(RequestError, match="has no GGUF files"):
        names.select(HubName("a/b"), [])


@pytest.mark.parametrize("name", ["model.gguf", "a/model.gguf", "/a/b", "a/b/c", "./a", "~/a", "a/b:", "..", "a\\b/c"])
def test_a_path_is_not_taken_for_a_name_of_the_hub(name: str):
    assert names.parse(name) is None
