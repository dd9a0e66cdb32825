"""Downloads from a hub on loopback, by vLLM's own interpreter: once, seen, and ending with us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from airflow_provider_vllm.exceptions import DownloadFailed
from airflow_provider_vllm.server import hub, hub_fetch
from airflow_provider_vllm.server.hub import Progress
from airflow_provider_vllm.server.hub_fetch import wanted_files
from tests.fakes.hub import COMMIT, FakeHub
from tests.fakes.model_files import safetensors_bytes
from tests.leftovers import below, live_processes

WEIGHTS = safetensors_bytes({"a": ("I8", (3_000_000,))})
FILES = {
    "config.json": b'{"a": 1}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"the same weights once more",
    "original/consolidated.00.pth": b"and again",
}

# Downloads, writes each progress as a line, and the folder or error at the end.
DOWNLOADER = """
import json, os, sys
from pathlib import Path
from airflow_provider_vllm.server import hub
home, python = Path(sys.argv[1]), sys.argv[2]
def say(progress):
    print(json.dumps(progress.__dict__), flush=True)
found = hub.download_once("org/name", cache_dir=home / "hub", lock_dir=home / "locks",
                          environ=dict(os.environ), python=python, on_progress=say, every_s=0.2)
print(json.dumps({"folder": str(found)}), flush=True)
"""


class Client:
    """One worker's cache, locks and environment."""

    def __init__(self, home: Path, hub_url: str, python: Path) -> None:
        self.home, self.python = home, python
        self.environ = {"PATH": os.environ["PATH"], "HF_ENDPOINT": hub_url, "HF_HOME": str(home)}

    def download(
        self,
        model: str = "org/name",
        on_progress: Callable[[Progress], None] = lambda progress: None,
        timeout_s: float | None = None,
        **environ: str,
    ) -> Path:
        return hub.download_once(
            model,
            cache_dir=self.home / "hub",
            lock_dir=self.home / "locks",
            environ={**self.environ, **environ},
            python=str(self.python),
            on_progress=on_progress,
            every_s=0.2,
            timeout_s=timeout_s,
        )

    @contextmanager
    def process(self) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [sys.executable, "-c", DOWNLOADER, str(self.home), str(self.python)],
            env={**os.environ, **self.environ, "HF_TOKEN": "secret"},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


@pytest.fixture
def client(tmp_path: Path, vllm_python: Path) -> Callable[[FakeHub], Client]:
    return lambda fake: Client(tmp_path, fake.url, vllm_python)


def test_what_vllm_reads_is_fetched_and_nothing_twice(client: Callable[[FakeHub], Client]) -> None:
    with FakeHub({"org/name": FILES}) as fake:
        seen: list[Progress] = []
        folder = client(fake).download(on_progress=seen.append)
        assert folder.name == COMMIT
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS
        assert sorted(path.name for path in folder.iterdir()) == [
            "config.json",
            "model.safetensors",
        ]
        assert (seen[0].total, seen[0].done) == (None, 0)
        size = len(WEIGHTS) + len(FILES["config.json"])
        assert (seen[-1].total, seen[-1].done) == (size, size)
        assert str(seen[-1]).startswith("downloading org/name: 2.9 MiB of 2.9 MiB")
        before = fake.sent.copy()
        assert client(fake).download() == folder
        assert fake.sent == before


def test_several_tasks_download_once(client: Callable[[FakeHub], Client]) -> None:
    with FakeHub({"org/name": FILES}, bytes_per_s=3e6) as fake:
        worker = client(fake)
        with worker.process() as one, worker.process() as two, worker.process() as three:
            outputs = [process.communicate(timeout=60)[0] for process in (one, two, three)]
        lines = [[json.loads(line) for line in output.splitlines()] for output in outputs]
        assert {line[-1]["folder"] for line in lines} == {str(worker.download())}
        assert fake.sent["model.safetensors"] == len(WEIGHTS)
        waited = [[entry for entry in line if entry.get("waiting")] for line in lines]
        assert sum(1 for entries in waited if entries) == 2
        # Who waits sees how far the other one is.
        assert any(entry["total"] for entries in waited for entry in entries)


def test_a_download_ends_with_who_started_it_and_can_be_begun_again(
    client: Callable[[FakeHub], Client],
) -> None:
    with FakeHub({"org/name": FILES}, bytes_per_s=2e5) as fake:
        worker = client(fake)
        with worker.process() as process:
            wait_until(lambda: fake.sent["model.safetensors"] > 0)
            children = below(process.pid, live_processes(), skip=frozenset())
            assert [child for child in children if "secret" in child.command] == []
            assert len(children) == 1
            process.kill()
            process.wait()
        wait_until(lambda: children[0].pid not in {p.pid for p in live_processes()})
        assert list(worker.home.glob("hub/*/blobs/*.incomplete")) == []
        fake.bytes_per_s = float("inf")
        folder = worker.download()
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def wait_until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_download_that_takes_too_long_is_ended(client: Callable[[FakeHub], Client]) -> None:
    with FakeHub({"org/name": FILES}, bytes_per_s=1e5) as fake:
        with pytest.raises(DownloadFailed, match="not downloaded within 2 s") as caught:
            client(fake).download(timeout_s=2)
        assert caught.value.transient
        assert list(client(fake).home.glob("hub/*/blobs/*.incomplete")) == []


def test_gated_models_say_what_to_do_and_never_the_token(
    client: Callable[[FakeHub], Client],
) -> None:
    with FakeHub({"org/name": FILES}, gated=frozenset({"org/name"})) as fake:
        worker = client(fake)
        for token in ("", "wrong-token"):
            with pytest.raises(DownloadFailed, match="GatedRepoError") as caught:
                worker.download(HF_TOKEN=token)
            assert "hf_conn_id" in str(caught.value)
            assert "wrong-token" not in str(caught.value)
            assert not caught.value.transient
        assert worker.download(HF_TOKEN="secret").name == COMMIT
        assert "Bearer secret" in fake.tokens


@pytest.mark.parametrize(
    ("model", "status", "said", "transient"),
    [
        (
            "tiny",
            None,
            r"no model of this name.*\. Correct `model`: it is no folder on this",
            False,
        ),
        ("org/na me", None, r"that is no name of a model .*\. Correct `model`", False),
        ("org/name", 401, r"refuses the token, or wants one .*\. Correct the token, or set", False),
        ("org/name", 403, r"refuses to give it to this token .*\. Correct the token", False),
        ("org/name", 404, r"no such thing .*\. Correct `model`.*HF_ENDPOINT", False),
        (
            "org/name",
            429,
            r"asked too often from here .*\. Try again later, or set `hf_conn_id`",
            True,
        ),
        ("org/name", 500, r"did not answer as it should .*\. See that this worker reaches", True),
    ],
)
def test_a_refusal_says_in_whole_sentences_what_to_do(
    client: Callable[[FakeHub], Client], model: str, status: int | None, said: str, transient: bool
) -> None:
    with FakeHub({}) as fake:
        fake.fail_with = status
        with pytest.raises(
            DownloadFailed, match=rf"^{model} could not be downloaded: .*{said}"
        ) as caught:
            client(fake).download(model)
    text = str(caught.value)
    assert caught.value.transient is transient
    assert "\n" not in text
    assert text.endswith(".")
    assert "repo_type" not in text, "the library's own advice is about its own arguments"


def test_a_hub_in_trouble_is_worth_another_try_unless_the_model_is_here(
    client: Callable[[FakeHub], Client],
) -> None:
    with FakeHub({"org/name": FILES}) as fake:
        worker = client(fake)
        fake.fail_with = 500
        with pytest.raises(DownloadFailed, match="try again") as caught:
            worker.download()
        assert caught.value.transient
        fake.fail_with = None
        folder = worker.download()
        fake.fail_with = 500
        assert worker.download() == folder
        assert worker.download(HF_HUB_OFFLINE="1") == folder


def test_a_disk_that_is_too_small_is_told_before_anything_is_fetched(
    client: Callable[[FakeHub], Client],
) -> None:
    with FakeHub({"org/name": FILES}, claimed={"model.safetensors": 10**18}) as fake:
        with pytest.raises(DownloadFailed, match=r"NoSpace: 10{17}8 bytes are missing") as caught:
            client(fake).download()
        assert "download_dir" in str(caught.value)
        assert fake.sent["model.safetensors"] == 0


def test_a_fetching_process_that_ends_without_a_word(tmp_path: Path) -> None:
    worker = Client(tmp_path, "http://127.0.0.1:9", Path("/bin/false"))
    with pytest.raises(DownloadFailed, match=r"ended early \(exit status 1\)\. See what it said"):
        worker.download()


def test_an_interpreter_without_the_hubs_library(tmp_path: Path) -> None:
    worker = Client(tmp_path, "http://127.0.0.1:9", tmp_path / "python")
    worker.python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    worker.python.chmod(0o755)
    with pytest.raises(DownloadFailed, match=r"lacks the hub's library.*huggingface_hub") as caught:
        worker.download()
    assert not caught.value.transient


def test_a_token_in_the_childs_last_words_is_masked(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "refused: $HF_TOKEN" >&2\nexit 3\n')
    python.chmod(0o755)
    with pytest.raises(DownloadFailed, match=r"exit status 3: refused: \*\*\*") as caught:
        Client(tmp_path, "", python).download(HF_TOKEN="hf_abc")
    assert "hf_abc" not in str(caught.value)


def test_files_that_a_killed_download_left_are_removed_when_old(
    client: Callable[[FakeHub], Client], tmp_path: Path
) -> None:
    blobs = tmp_path / "hub" / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    names = ("aa.12345678.incomplete", "bb.12345678.incomplete", "cc.incomplete")
    for name in names:
        (blobs / name).touch()
    os.utime(blobs / names[0], (0, 0))
    os.utime(blobs / names[2], (0, 0))  # older libraries take this one up again
    with FakeHub({"org/name": FILES}) as fake:
        client(fake).download()
    assert [(blobs / name).exists() for name in names] == [False, True, True]


@pytest.mark.parametrize(
    ("files", "load_format", "weights"),
    [
        (["model.safetensors", "pytorch_model.bin"], "auto", ["model.safetensors"]),
        (["pytorch_model.bin", "x.pt"], "auto", ["pytorch_model.bin"]),
        (["consolidated.safetensors", "model.safetensors"], "auto", ["consolidated.safetensors"]),
        (
            ["consolidated.safetensors", "a.safetensors"],
            "hf",
            ["a.safetensors", "consolidated.safetensors"],
        ),
        (["model.safetensors", "x.pt"], "pt", ["x.pt"]),
        (["onnx/model.onnx", "original/a.safetensors"], "auto", []),
    ],
)
def test_one_set_of_weights_is_chosen(
    files: list[str], load_format: str, weights: list[str]
) -> None:
    others = ["config.json", "1_Pooling/config.json"]
    assert sorted(wanted_files([*others, *files], load_format, {})) == sorted(others + weights)


@pytest.mark.parametrize(
    ("model", "engine_args", "environ", "expected"),
    [
        ("org/name", {}, {}, True),
        ("gpt2", {"load-format": "safetensors"}, {}, True),
        ("/models/name", {}, {}, False),
        ("s3://bucket/name", {}, {}, False),
        ("org/name:Q4_K_M", {}, {}, False),
        ("org/name", {"load_format": "dummy"}, {}, False),
        ("org/name", {}, {"HF_HUB_OFFLINE": "1"}, False),
        ("org/name", {}, {"VLLM_USE_MODELSCOPE": "True"}, False),
    ],
)
def test_when_there_is_something_to_download(
    model: str, engine_args: dict, environ: dict, expected: bool
) -> None:
    assert hub.needs_download(model, engine_args, environ) is expected


def test_an_index_decides_which_files_are_weights() -> None:
    files = ["m-1.safetensors", "m-2.safetensors", "adapter.safetensors"]
    index = {"a": "m-1.safetensors", "b": "m-2.safetensors"}
    assert wanted_files(files, "auto", index) == ["m-1.safetensors", "m-2.safetensors"]


def test_the_program_imports_nothing_of_this_package() -> None:
    assert "airflow_provider_vllm" not in Path(hub_fetch.__file__).read_text()
