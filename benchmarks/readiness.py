"""How soon a start and a death are known: in state.json, and to the task that waits.

    python -m benchmarks.readiness [--rounds N] [--real N]

Each round starts a server through the real supervisor. An independent prober asks it every 20 ms, and its first
good answer is compared with the time at which state.json says `ready`; then one of its processes is killed.
Many rounds with a fake vLLM, which is ready in a fraction of a second, some with real vLLM on the CPU.
Prints a table, and ends with status 1 where a limit was passed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from airflow_provider_vllm.exceptions import ServerError
from airflow_provider_vllm.server import state
from airflow_provider_vllm.server.handle import ServerHandle
from airflow_provider_vllm.server.launch import LaunchOptions, launch
from airflow_provider_vllm.server.processes import ProcessId, descendants, this_process
from airflow_provider_vllm.server.start import wait
from airflow_provider_vllm.server.state import GenerationDir, ServerState, StateRoot
from airflow_provider_vllm.server.stop import stop_generation
from airflow_provider_vllm.spec import ServerSpec
from scripts.models import TINY
from scripts.set_up import MODELS, ROOT

PROBE_S = 0.02
LOOK_S = 0.01
PATIENCE_S = 300.0

READY, HEARD_READY = (
    "first good answer -> ready in state.json",
    "ready in state.json -> the task that waits",
)
DEAD, ENGINE = (
    "death of the server -> failed in state.json",
    "death of the engine -> failed in state.json",
)
HEARD_FAILED = "failed in state.json -> the task that waits"
LIMITS = {READY: 0.5, HEARD_READY: 1.0, DEAD: 0.5, ENGINE: 1.5, HEARD_FAILED: 1.0}

Delays = defaultdict[tuple[str, str], list[float]]


@dataclass(frozen=True)
class Server:
    """One launched start."""

    spec: ServerSpec
    handle: ServerHandle
    directory: GenerationDir

    @property
    def state(self) -> ServerState:
        found = self.directory.read()
        assert found is not None
        return found

    def time_of(self, right: Callable[[ServerState], object]) -> float:
        """When state.json first showed what `right` asks for, in seconds of the monotonic clock."""
        deadline = time.monotonic() + PATIENCE_S
        while not right(self.state):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"state.json still says {self.state.state}; see {self.directory.path}"
                )
            time.sleep(LOOK_S)
        return time.monotonic()

    def time_heard(self) -> float:
        """When a task that waits for it hears how its start ended."""
        with contextlib.suppress(ServerError):
            wait(self.handle, self.directory, self.spec, report=lambda line: None)
        return time.monotonic()

    def time_of_good_answer(self) -> float:
        """When the server itself first answered well, asked by us and not by the supervisor."""
        self.time_of(lambda current: current.base_url)
        key = self.directory.key() or ""
        port = urlsplit(self.state.base_url or "").port
        while not all(_answers(port, path, key) for path in ("/health", "/v1/models")):
            time.sleep(PROBE_S)
        return time.monotonic()


def _answers(port: int | None, path: str, key: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def kill(process: ProcessId | None) -> float:
    """Kill a process; when it was dead."""
    assert process is not None
    process.signal(signal.SIGKILL)
    while process.alive:
        time.sleep(0.001)
    return time.monotonic()


def engine_of(server: Server) -> ProcessId:
    """The engine: real vLLM names it so (15 characters), the fake on its command line."""
    assert server.state.guard
    for stat in descendants(server.state.guard.pid):
        if "EngineCor" in stat.name or _command(stat.pid).endswith("engine"):
            return stat.identity
    raise LookupError("no engine below the guard")


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()


@contextlib.contextmanager
def launched(spec: ServerSpec, root: StateRoot) -> Iterator[Server]:
    handle = launch(spec, "benchmark", root, LaunchOptions(owner=this_process()))
    directory = handle.directory(root)
    assert directory is not None
    try:
        yield Server(spec, handle, directory)
    finally:
        stop_generation(directory, "the round is over")


def start_then_death(
    kind: str, spec: ServerSpec, root: StateRoot, what: str, delays: Delays
) -> None:
    """One round: how soon `ready` is known, then how soon the death of `what` is."""
    with launched(spec, root) as server, ThreadPoolExecutor(3) as pool:
        heard = pool.submit(server.time_heard)
        written = pool.submit(server.time_of, lambda current: current.state == state.READY)
        answered = pool.submit(server.time_of_good_answer)
        delays[kind, READY].append(written.result() - answered.result())
        delays[kind, HEARD_READY].append(heard.result() - written.result())
        # The fake's engine may die only when its server has stood for a while, as a real one's does.
        time.sleep(1.0)
        failed = pool.submit(server.time_of, lambda current: current.state == state.FAILED)
        died = kill(engine_of(server) if what == ENGINE else server.state.engine)
        delays[kind, what].append(failed.result() - died)


def death_of_a_start(kind: str, spec: ServerSpec, root: StateRoot, delays: Delays) -> None:
    """One round: vLLM dies while it loads, and a task waits for it."""
    with launched(spec, root) as server, ThreadPoolExecutor(2) as pool:
        heard = pool.submit(server.time_heard)
        server.time_of(lambda current: current.engine)
        time.sleep(0.5)
        failed = pool.submit(server.time_of, lambda current: current.state == state.FAILED)
        died = kill(server.state.engine)
        delays[kind, DEAD].append(failed.result() - died)
        delays[kind, HEARD_FAILED].append(heard.result() - failed.result())


def fake(plan: dict[str, object]) -> ServerSpec:
    command = [sys.executable, str(ROOT / "tests" / "fakes" / "vllm.py"), "--port", "{port}"]
    command += ["--model", "{model}", "--plan", json.dumps(plan)]
    return ServerSpec("tiny", command=tuple(command), gpus=0, preflight="off", startup_timeout=60)


def real() -> ServerSpec:
    return ServerSpec(
        str(MODELS / TINY),
        python=str(ROOT / ".venv-vllm" / "bin" / "python"),
        gpus=0,
        engine_args={"enforce_eager": True, "dtype": "float32", "max_model_len": 512},
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        startup_timeout=PATIENCE_S,
    )


def measure(
    kind: str, spec: ServerSpec, loading: ServerSpec, rounds: int, root: StateRoot, delays: Delays
) -> None:
    for number in range(rounds):
        print(f"{kind}, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        start_then_death(kind, spec, root, DEAD, delays)
        start_then_death(kind, spec, root, ENGINE, delays)
        death_of_a_start(kind, loading, root, delays)


def table(delays: Delays) -> bool:
    """Print it; whether every delay kept within its limit."""
    print(f"{'':48} {'vLLM':5} {'times':>5} {'median':>8} {'longest':>8} {'limit':>7}")
    good = True
    for (kind, what), found in sorted(
        delays.items(), key=lambda item: (list(LIMITS).index(item[0][1]), item[0])
    ):
        limit, longest = LIMITS[what], max(found)
        good &= longest < limit
        middle = statistics.median(found)
        print(f"{what:48} {kind:5} {len(found):5} {middle:6.2f} s {longest:6.2f} s {limit:5.1f} s")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=10, help="rounds with the fake (three starts each)"
    )
    parser.add_argument(
        "--real", type=int, default=2, help="rounds with real vLLM (three starts each)"
    )
    args = parser.parse_args()
    delays: Delays = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        root = StateRoot(Path(folder) / "vllm")
        measure(
            "fake", fake({"start_s": 0.6}), fake({"never_ready": True}), args.rounds, root, delays
        )
        measure("real", real(), real(), args.real, root, delays)
    return 0 if table(delays) else 1


if __name__ == "__main__":
    sys.exit(main())
