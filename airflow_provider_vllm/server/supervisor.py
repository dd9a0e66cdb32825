"""The process that owns one start of one server: `python -m airflow_provider_vllm.server.supervisor DIR`.

Enters: the order in DIR. Leaves: state.json, vllm.log, the diagnosis, and no process once it has ended.

Invariants: every unrequested end is written down, then diagnosed, before anything is removed; the tree
is gone when `settled` is true. As a sub-reaper it inherits what a killed guard leaves, so nothing of the
tree can get away from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_provider_vllm.exceptions import ServerError
from airflow_provider_vllm.server import control, gpu_locks, gpus, remains, state
from airflow_provider_vllm.server.checks.options import Options
from airflow_provider_vllm.server.interpreter import inspect
from airflow_provider_vllm.server.lease import Lease
from airflow_provider_vllm.server.life import End, Life, Terms
from airflow_provider_vllm.server.locks import file_lock
from airflow_provider_vllm.server.order import Order, free_port, url_of
from airflow_provider_vllm.server.processes import adopt_orphans, this_process
from airflow_provider_vllm.server.record import Record
from airflow_provider_vllm.server.state import GenerationDir, ServerState, pid_namespace

if TYPE_CHECKING:
    from aiohttp import web

PORT_ATTEMPTS = 5
# vLLM ends by itself within about half a second when idle; while it loads it ignores SIGTERM.
GRACE_S = 5.0
GRACE_LOADING_S = 1.0
MEMORY_S = 5.0
LAST_LOOK_S = 2.0
POSTMORTEM = "airflow_provider_vllm.server.postmortem"
# The tree stays until its evidence is taken, and no longer.
DIAGNOSIS_S = 15.0
# Others hold the lock of this start for an instant, to see whether it is held.
LOCK_S = 5.0

log = logging.getLogger("supervisor")


class Supervisor:
    """One start. `run()` returns when nothing of the server is left."""

    def __init__(self, directory: GenerationDir) -> None:
        self.dir = directory
        self.order = order = Order.read(directory)
        self.spec = order.spec
        self.key = directory.key() or ""
        if not self.key:
            raise ServerError(f"{directory.key_file} is missing or empty: this start has no key.")
        self.record = Record(directory, _first_state(order))
        lease = Lease.start(
            time.monotonic(),
            idle_timeout=self.spec.idle_timeout,
            max_lifetime=self.spec.max_lifetime,
        )
        self.terms = Terms(lease, order.owner)
        self.life: Life | None = None
        self.asked: End | None = None
        self.lock_fds: tuple[int, ...] = ()
        self.gpus_before: tuple[gpus.Gpu, ...] = ()
        self.devices = gpus.device_environ((), ())

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self.ask_to_stop, f"supervisor got signal {number}")
        runner, url = await self.open_control()
        try:
            if not self.record.write_first(control_url=url, lease_until=self.terms.until):
                log.info("this start was called off before it began")
                return
            await self.take_down(await self.claim_gpus() or await self.live())
        except Exception as exc:
            log.exception("the supervisor failed")
            await self.take_down(End(state.FAILED, "crash", f"the supervisor failed: {exc!r}"))
            raise
        finally:
            gpu_locks.release(self.lock_fds)
            await runner.cleanup()

    def ask_to_stop(self, reason: str) -> None:
        text = " ".join(reason.split())[:200]
        self.asked = self.asked or End(state.STOPPED, "asked", f"stopped as asked ({text})")
        if self.life:
            self.life.finish(self.asked)

    async def open_control(self) -> tuple[web.AppRunner, str]:
        from aiohttp import web

        app = control.build_app(
            token=control.token_for(self.key, self.order.nonce),
            log_file=self.dir.log_file,
            status=lambda: {**self.record.state.to_json(), "lease_until": self.terms.until},
            renew=self.terms.renew,
            release=self.terms.release,
            stop=self.ask_to_stop,
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, self.spec.host, 0).start()
        port = runner.addresses[0][1]
        return runner, url_of(self.spec.host, port)

    async def claim_gpus(self) -> End | None:
        """Take the locks of the GPUs; an End where they can't be had."""
        wanted = self.spec.gpus
        if not wanted:
            return None
        listed = await asyncio.to_thread(gpus.list_gpus)
        claim = await asyncio.to_thread(
            gpu_locks.claim,
            self.dir.root / "locks",
            listed,
            wanted if isinstance(wanted, int) else len(wanted),
            owner=self.order.server_id,
            wanted=wanted if isinstance(wanted, tuple) else (),
            min_free_fraction=self.needed_fraction(),
        )
        if isinstance(claim, gpus.Shortage):
            reason = "no_gpu" if claim.waiting_helps else "too_few_gpus"
            return End(state.FAILED, reason, await asyncio.to_thread(gpus.explain, claim, listed))
        self.lock_fds = claim.fds
        self.gpus_before = tuple(gpu for gpu in listed if gpu.uuid in claim.uuids)
        reads_uuids = bool(self.spec.command) or inspect(self.order.python).reads_gpu_uuids
        self.devices = gpus.device_environ(claim.uuids, listed, reads_uuids=reads_uuids)
        self.record.write(gpus=claim.uuids)
        return None

    def needed_fraction(self) -> float:
        """The part of a GPU's memory that has to be free: vLLM refuses to start with less."""
        options = Options.of(self.spec.engine_args)
        return 0.0 if options.get("kv_cache_memory_bytes") else options.gpu_memory_utilization

    async def live(self) -> End:
        """Lead one life of vLLM; with a free choice of port, another one where that was taken."""
        # Loaded while all is well and there is time: a failure is told the sooner.
        preloaded = asyncio.create_task(asyncio.to_thread(import_module, POSTMORTEM))
        for attempt in range(1, PORT_ATTEMPTS + 1):
            port = self.spec.port or free_port(self.spec.host)
            self.life = Life(self.order, self.key, self.record, self.terms, port, self.devices)
            if self.asked:
                return self.asked
            end = await self.life.run(self.lock_fds)
            if end.reason != "port_taken" or self.spec.port or attempt == PORT_ATTEMPTS:
                break
            log.warning("%s: trying another port", end.message)
            await self.life.process.kill_tree()
            await self.life.process.close()
            self.dir.log_file.rename(self.dir.path / f"vllm.port-{port}.log")
        await asyncio.wait([preloaded])
        return end

    # -- the end -----------------------------------------------------------------------------

    async def take_down(self, end: End) -> None:
        """Write the end down, find its cause, and leave nothing behind."""
        loading = self.record.state.state == state.LOADING
        process = self.life.process if self.life else None
        if end.state == state.FAILED:
            self.record.write(
                state=state.FAILED,
                reason=end.reason,
                message=end.message,
                exit_status=process.exit_status if process else None,
                ended_at=time.time(),
            )
            await self.diagnose()
        else:
            self.record.write(state=state.DRAINING, reason=end.reason, message=end.message)
            if process and process.engine and not process.exited.is_set():
                process.terminate()
                exited = asyncio.ensure_future(process.exited.wait())
                await asyncio.wait([exited], timeout=GRACE_LOADING_S if loading else GRACE_S)
                exited.cancel()
        left = await self.end_tree()
        notes = [f"still alive: pid {pid}" for pid in left] + await self.memory_not_back()
        self.record.write(
            state=state.FAILED if left else end.state,
            message="; ".join([end.message, *notes]),
            exit_status=process.exit_status if process else None,
            ended_at=self.record.state.ended_at or time.time(),
            settled=True,
        )

    async def end_tree(self) -> list[int]:
        """Kill what is left and remove its segments; the pids that are still alive."""
        if self.life is None or self.life.process.guard is None:
            return []
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.life.record_tree(), LAST_LOOK_S)
        await self.life.process.kill_tree()
        await self.life.process.close()
        left = await asyncio.to_thread(
            remains.end, self.dir, self.record.state, below=os.getpid(), timeout=3.0
        )
        return [each.pid for each in left]

    async def memory_not_back(self) -> list[str]:
        """The driver needs a moment to free a killed process's memory; what stays is named."""
        deadline = time.monotonic() + MEMORY_S
        while self.gpus_before:
            # No longer: who asked for the stop waits for it.
            patience = max(1.0, deadline - time.monotonic())
            after = await asyncio.to_thread(gpus.list_gpus, timeout=patience)
            held = gpus.memory_returned(self.gpus_before, after)
            if not held:
                break
            if time.monotonic() > deadline:
                return [f"GPU memory has not come back: {item}" for item in held]
            await asyncio.sleep(0.25)
        return []

    async def diagnose(self) -> None:
        """Evidence and diagnosis, before anything of the failure is removed."""
        if self.life is None:
            return
        try:
            examine = import_module(POSTMORTEM).examine
            found, text = await asyncio.wait_for(
                asyncio.to_thread(examine, self.dir, self.order, self.record.state), DIAGNOSIS_S
            )
            self.record.write(diagnosis=found.to_json(), report=text)
        except Exception:
            log.exception("the failure could not be diagnosed")


def _first_state(order: Order) -> ServerState:
    return ServerState(
        server_id=order.server_id,
        generation=order.generation,
        nonce=order.nonce,
        host=socket.gethostname(),
        pid_namespace=pid_namespace(),
        supervisor=this_process(),
        model=order.spec.served_model_name,
        task=order.task,
        started_at=time.time(),
    )


def main(argv: list[str]) -> int:
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stdout,
    )

    async def supervise() -> None:
        # Inside the loop: futures and events belong to it.
        directory = GenerationDir(Path(argv[1]))
        with file_lock(directory.alive_file, timeout=LOCK_S):
            await Supervisor(directory).run()
        # A thread that hangs in a driver or on a disk must not keep this process.
        logging.shutdown()
        os._exit(0)

    adopt_orphans()
    asyncio.run(supervise())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
