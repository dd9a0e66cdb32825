"""Following a log: torn lines, progress bars, lines of any length."""

from __future__ import annotations

import time
from pathlib import Path

from airflow_provider_vllm.server import logwatch
from airflow_provider_vllm.server.logwatch import LogWatch, News

WEIGHTS = b"(EngineCore pid=1) INFO 01-01 00:00:00 [gpu_model_runner.py:5012] Starting to load model tiny...\n"
PROGRESS = (
    b"\rLoading safetensors checkpoint shards:  %d%% Completed | %d/4 [00:01<00:01,  1.50it/s]"
)
DEAD = b"(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1231] EngineCore failed to start.\n"
TAKEN = b"OSError: [Errno 98] Address already in use\n"


class Log:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "vllm.log"
        self.watch = LogWatch(self.path)

    def write(self, data: bytes) -> None:
        with self.path.open("ab") as log:
            log.write(data)

    def said(self, data: bytes) -> News:
        self.write(data)
        return self.watch.read()


def test_no_file_and_no_news(tmp_path: Path) -> None:
    log = Log(tmp_path)
    assert log.watch.read() == News()
    assert log.said(WEIGHTS).stage == "load weights"
    assert log.watch.read() == News()


def test_a_torn_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for byte in range(0, len(DEAD) - 1, 7):
        assert log.said(DEAD[byte : byte + 7].removesuffix(b"\n")) == News()
    fatal = log.said(b"\n").fatal
    assert fatal
    assert fatal.endswith("EngineCore failed to start.")


def test_a_coloured_line_is_read_like_any_other(tmp_path: Path) -> None:
    grey, end = b"\x1b[90m", b"\x1b[0m"
    news = Log(tmp_path).said(
        b"\x1b[0;36m(EngineCore pid=1)\x1b[0;0m \x1b[31mERROR" + end + b" " + grey + b"01-01 00:00:00"
        + end + b" " + grey + b"[core.py:1231]" + end + b" EngineCore failed to start.\n"
    )  # fmt: skip
    assert news.fatal == DEAD.decode().strip()


def test_a_character_torn_in_two_is_no_error(tmp_path: Path) -> None:
    log = Log(tmp_path)
    text = "é Starting to load model tiny\n".encode()
    log.said(text[:1])
    assert log.said(text[1:]).stage == "load weights"
    assert log.said(b"\xff\xfe\x00\n").stage is None


def test_progress_bars_come_back_to_the_beginning_of_their_line(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(b"Capturing CUDA graphs:   0%|          | 0/4")
    log.write(b"\rCapturing CUDA graphs:  25%|##        | 1/4")
    news = log.said(b"\rCapturing CUDA graphs:  50%|#####     | 2/4 [00:01<00:01]\r")
    assert (news.stage, news.progress) == ("warm up", "50% (2/4)")


def test_a_taken_port_is_told_from_a_retried_rendezvous(tmp_path: Path) -> None:
    log = Log(tmp_path)
    assert not log.said(
        b"WARNING port 29500 is in use: Address already in use. Retrying with a new port\n"
    ).port_taken
    assert log.said(TAKEN).port_taken


def test_a_huge_line_is_searched_at_its_beginning_and_takes_no_time(tmp_path: Path) -> None:
    log = Log(tmp_path)
    # What a pattern that tries every position would need minutes for.
    huge = b"INFO Received request x: prompt: '" + b"1" * 3_000_000 + b" 1%|1%|" * 100_000 + TAKEN
    log.write(huge + WEIGHTS)
    began = time.monotonic()
    news = []
    while True:
        news.append(log.watch.read())
        if not news[-1].more:
            break
    assert time.monotonic() - began < 2
    assert not any(each.port_taken for each in news)
    assert news[-1].stage == "load weights"


def test_one_read_takes_one_block(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(b"x" * 79 + b"\n" + b"y" * logwatch.BLOCK + b"\n" + TAKEN)
    assert log.watch.read().more
    last = log.watch.read()
    assert not last.more
    assert last.port_taken


def test_a_log_that_was_emptied_is_followed_from_its_beginning(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.said(b"a long first line that is longer than what follows after it was emptied\n" * 3)
    log.path.write_bytes(b"")
    assert log.watch.read() == News()
    assert log.said(WEIGHTS).stage == "load weights"
