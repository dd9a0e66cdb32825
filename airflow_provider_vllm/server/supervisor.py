"""The process that owns one start of one server: `python -m airflow_provider_vllm.server.supervisor DIR`.

Enters: the order in DIR. Leaves: state.json, vllm.log, the diagnosis, and no process once it has ended.

Invariants: ready is said only of our own server; every unrequested end is written down, then
diagnosed, before anything is removed; the tree is gone when `settled` is true.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_provider_vllm.server import control, gpu_locks, gpus, probe, segments, state
from airflow_provider_vllm.server.guarded import GuardedProcess
from airflow_provider_vllm.server.lease import Lease
from airflow_provider_vllm.server.logwatch import LogWatch
from airflow_provider_vllm.server.order import Order, free_port, url_of
from airflow_provider_vllm.server.processes import kill, this_process, tree_of
from airflow_provider_vllm.server.state import GenerationDir, ServerState, pid_namespace, write_json

PORT_ATTEMPTS = 5
LOG_S = 0.2
PROBE_S = 0.2
HEALTH_S = 0.5
LIMITS_S = 0.5
METRICS_S = 5.0
TREE_S = 0.5
TREE_READY_S = 10.0
# An API server on a busy host may need seconds for an answer; silence of this length is a freeze.
FROZEN_S = 30.0
# vLLM ends by itself within about half a second when idle; while it loads it ignores SIGTERM.
GRACE_S = 5.0
GRACE_LOADING_S = 1.0
# After a fatal line vLLM exits by itself: its status is worth a short wait.
LAST_WORDS_S = 0.7

log = logging.getLogger("supervisor")


@dataclass(frozen=True)
class End:
    """Why a life ended: `state` is FAILED or STOPPED, `reason` as in ServerState."""

    state: str
    reason: str
    message: str


class Supervisor:
    """One start. `run()` returns when nothing of the server is left."""

    def __init__(self, directory: GenerationDir) -> None:
        self.dir = directory
        self.order = Order.read(directory)
        self.spec = self.order.spec
        self.key = directory.key() or ""
        self.owner = self.order.owner
        self.state = ServerState(
            server_id=self.order.server_id,
            generation=self.order.generation,
            nonce=self.order.nonce,
            host=socket.gethostname(),
            pid_namespace=pid_namespace(),
            supervisor=this_process(),
            model=self.spec.served_model_name,
            task=self.order.task,
            started_at=time.time(),
        )
        self.process = GuardedProcess()
        self.lock_fds: tuple[int, ...] = ()
        self.gpus_before: tuple[gpus.Gpu, ...] = ()
        self.ending: asyncio.Future[End] | None = None
        self.asked: End | None = None
        self.lease = Lease.start(
            time.monotonic(),
            idle_timeout=self.spec.idle_timeout,
            max_lifetime=self.spec.max_lifetime,
        )

    # -- what others see ---------------------------------------------------------------------

    def write(self, **changes: Any) -> None:
        """Change the state and write it, where that changes anything."""
        now = time.time()
        if "stage" in changes and changes["stage"] != self.state.stage:
            changes["stage_since"] = now
        changed = self.state.but(**changes)
        if changed != self.state or not self.state.updated_at:
            if changed.state != self.state.state:
                log.info("%s: %s", changed.state, changed.message or "")
            self.state = changed.but(updated_at=now)
            write_json(self.dir.state_file, self.state.to_json())

    def renew(self, idle_timeout: float | None) -> None:
        self.lease = self.lease.renew(time.monotonic(), idle_timeout)

    def release(self) -> None:
        self.owner = None
        self.renew(None)

    def finish(self, end: End) -> None:
        """End this life; the first reason stands."""
        if self.ending and not self.ending.done():
            self.ending.set_result(end)

    def ask_to_stop(self, reason: str) -> None:
        self.asked = self.asked or End(state.STOPPED, "asked", f"stopped as asked ({reason[:200]})")
        self.finish(self.asked)

    # -- one life ----------------------------------------------------------------------------

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask_to_stop, f"supervisor got signal {number}")
        runner = await self.open_control()
        try:
            end = await self.claim_gpus() or await self.live()
            await self.take_down(end)
        except Exception as exc:
            log.exception("the supervisor failed")
            await self.take_down(End(state.FAILED, "crash", f"the supervisor failed: {exc!r}"))
            raise
        finally:
            gpu_locks.release(self.lock_fds)
            await runner.cleanup()

    async def open_control(self) -> Any:
        from aiohttp import web

        app = control.build_app(
            token=control.token_for(self.key, self.order.nonce),
            log_file=self.dir.log_file,
            status=lambda: {**self.state.to_json(), "lease_until": self.lease_until()},
            renew=self.renew,
            release=self.release,
            stop=self.ask_to_stop,
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, self.spec.host, 0)
        await site.start()
        port = runner.addresses[0][1]
        self.write(control_url=url_of(self.spec.host, port), lease_until=self.lease_until())
        return runner

    def lease_until(self) -> float:
        return round(time.time() + self.lease.until - time.monotonic(), 1)

    async def claim_gpus(self) -> End | None:
        """Take the locks of the GPUs; an End where they can't be had."""
        wanted = self.spec.gpus
        if not wanted:
            return None
        listed = await asyncio.to_thread(gpus.list_gpus)
        uuids = wanted if isinstance(wanted, tuple) else ()
        count = len(uuids) or int(wanted if isinstance(wanted, int) else 0)
        fraction = float(self.spec.engine_args.get("gpu_memory_utilization", 0) or 0)
        claim = await asyncio.to_thread(
            gpu_locks.claim,
            self.dir.root / "locks",
            listed,
            count,
            owner=self.order.server_id,
            wanted=uuids,
            min_free_fraction=fraction,
        )
        if isinstance(claim, gpus.Shortage):
            reason = "no_gpu" if claim.waiting_helps else "too_few_gpus"
            text = f"{claim}" if listed else f"{claim} {gpus.driver_status()}"
            return End(state.FAILED, reason, text)
        self.lock_fds = claim.fds
        self.gpus_before = tuple(gpu for gpu in listed if gpu.uuid in claim.uuids)
        self.write(gpus=claim.uuids)
        return None

    async def live(self) -> End:
        """Start vLLM and watch it until its end; with a free choice of port, again on another one."""
        attempt = 1
        while True:
            if self.asked:
                return self.asked
            port = self.spec.port or free_port(self.spec.host)
            end = await self.watch(port)
            if end.reason != "port_taken" or self.spec.port or attempt >= PORT_ATTEMPTS:
                return end
            log.warning("port %s was taken by another process: trying another one", port)
            await self.process.kill_tree()
            await self.process.close()
            self.dir.log_file.rename(self.dir.path / f"vllm.port-{port}.log")
            self.process = GuardedProcess()
            attempt += 1

    async def watch(self, port: int) -> End:
        command = self.order.command(port)
        log.info("starting %s", " ".join(command))
        environ = self.order.environ(os.environ, self.key, self.state.gpus)
        try:
            await self.process.start(command, environ, self.dir.log_file, self.lock_fds)
        except OSError as exc:
            return End(state.FAILED, "exit", f"vLLM could not be started: {exc}")
        self.write(
            state=state.LOADING,
            stage="import",
            base_url=url_of(self.spec.host, port),
            guard=self.process.guard,
            engine=self.process.engine,
        )
        self.ending = asyncio.get_running_loop().create_future()
        if self.asked:
            self.finish(self.asked)
        self.news = LogWatch(self.dir.log_file)
        parts: list[Coroutine[Any, Any, None]] = [
            self.watch_exit(),
            self.watch_guard(),
            self.watch_log(),
            self.watch_answers(port),
            self.watch_limits(time.monotonic()),
            self.watch_tree(),
        ]
        tasks = [asyncio.create_task(self.guarded_part(part)) for part in parts]
        try:
            return await self.ending
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def guarded_part(self, part: Coroutine[Any, Any, None]) -> None:
        """A watcher that fails ends the life: a server that nobody watches is worse than none."""
        try:
            await part
        except Exception as exc:
            log.exception("a watcher failed")
            self.finish(End(state.FAILED, "crash", f"the supervisor failed: {exc!r}"))

    async def watch_exit(self) -> None:
        await self.process.exited.wait()
        taken = False
        if self.state.state == state.LOADING:
            taken = self.news.read().port_taken or self.port_was_taken
        status = self.process.exit_status
        if taken:
            self.finish(
                End(state.FAILED, "port_taken", f"the port {self.state.base_url} was taken")
            )
        self.finish(End(state.FAILED, "exit", f"vLLM ended with exit status {status}"))

    async def watch_guard(self) -> None:
        await self.process.guard_gone.wait()
        self.finish(
            End(state.FAILED, "guard_gone", "the guard of the vLLM processes was killed or gave up")
        )

    port_was_taken = False

    async def watch_log(self) -> None:
        while True:
            news = self.news.read()
            self.port_was_taken = self.port_was_taken or news.port_taken
            if self.state.state == state.LOADING and (news.stage or news.progress):
                self.write(stage=news.stage or self.state.stage, progress=news.progress)
            if news.fatal:
                log.error("fatal line: %s", news.fatal)
                await asyncio.wait(
                    [asyncio.ensure_future(self.process.exited.wait())], timeout=LAST_WORDS_S
                )
                self.finish(
                    End(state.FAILED, "engine_dead", f"the engine died: {news.fatal[:300]}")
                )
            await asyncio.sleep(LOG_S)

    async def watch_answers(self, port: int) -> None:
        import aiohttp

        host = "127.0.0.1" if self.spec.host in ("0.0.0.0", "") else self.spec.host
        host = "::1" if host == "::" else host
        url = url_of(host, port)
        foreign = 0
        async with aiohttp.ClientSession() as session:
            while True:
                answer = await probe.ask(
                    session, url, self.key, self.spec.served_model_name, timeout=2
                )
                if answer.verdict == probe.OURS:
                    break
                foreign = foreign + 1 if answer.verdict == probe.FOREIGN else 0
                if foreign >= 2:
                    text = f"another server answers on {url}: {answer.detail}"
                    self.finish(End(state.FAILED, "port_taken", text))
                if answer.verdict == probe.ENGINE_DEAD:
                    self.finish(
                        End(state.FAILED, "engine_dead", f"the engine died: {answer.detail}")
                    )
                await asyncio.sleep(PROBE_S)
            self.renew(None)
            self.write(state=state.READY, ready_at=time.time(), stage=None, progress=None)
            await self.watch_health(session, url)

    async def watch_health(self, session: Any, url: str) -> None:
        loop = asyncio.get_running_loop()
        good = metrics_at = loop.time()
        moved: float | None = None
        while True:
            answer = await probe.ask(session, url, self.key, self.spec.served_model_name, timeout=5)
            now = loop.time()
            if answer.verdict == probe.OURS:
                good = now
            elif answer.verdict == probe.ENGINE_DEAD:
                self.finish(End(state.FAILED, "engine_dead", f"the engine died: {answer.detail}"))
            elif now - good > FROZEN_S:
                text = f"the API server has not answered for {now - good:.0f} s ({answer.detail})"
                self.finish(End(state.FAILED, "api_frozen", text))
            if now - metrics_at >= METRICS_S:
                metrics_at = now
                seen = await probe.movement(session, url, timeout=5)
                if seen is not None and seen != moved:
                    if moved is not None:
                        self.renew(None)
                    moved = seen
            await asyncio.sleep(HEALTH_S)

    async def watch_limits(self, started: float) -> None:
        """Start-up time-out, lease, and the process with which the server ends."""
        while True:
            now = time.monotonic()
            if self.owner and not self.owner.alive:
                text = f"the task that started it (pid {self.owner.pid}) is gone"
                self.finish(End(state.STOPPED, "owner_gone", text))
            if self.state.state == state.LOADING:
                if now - started > self.spec.startup_timeout:
                    text = f"not ready after {self.spec.startup_timeout:g} s (startup_timeout), stage: {self.state.stage}"
                    self.finish(End(state.FAILED, "timeout", text))
                # A load is bounded by its own time-out; its lease starts when it is ready.
                self.lease = self.lease.renew(now)
            if ended := self.lease.ended(now):
                text = {
                    "idle": f"nobody used it for {self.lease.idle_timeout:g} s (idle_timeout)",
                    "max_lifetime": f"it lived for {self.lease.max_lifetime or 0:g} s (max_lifetime)",
                }[ended]
                self.finish(End(state.STOPPED, ended, text))
            await asyncio.sleep(LIMITS_S)

    async def watch_tree(self) -> None:
        """Record the tree and what it maps, so that others can remove it when we can't."""
        while True:
            self.record_tree()
            settled = self.state.state == state.READY and len(self.state.tree) > 1
            await asyncio.sleep(TREE_READY_S if settled else TREE_S)

    def record_tree(self) -> None:
        session = self.process.engine.pid if self.process.engine else None
        recorded = [process for process in (self.process.engine, *self.state.tree) if process]
        tree = tree_of(recorded, session, [self.dir.log_file])
        mapped = segments.mapped(stat.pid for stat in tree)
        self.write(
            tree=tuple(sorted((stat.identity for stat in tree), key=lambda p: p.pid)),
            segments=tuple(sorted(mapped | set(self.state.segments))),
            lease_until=self.lease_until(),
        )

    # -- the end -----------------------------------------------------------------------------

    async def take_down(self, end: End) -> None:
        """Write the end down, find its cause, and leave nothing behind."""
        loading = self.state.state == state.LOADING
        started = self.process.engine is not None
        if started:
            self.record_tree()
        if end.state == state.FAILED:
            self.write(
                state=state.FAILED,
                reason=end.reason,
                message=end.message,
                exit_status=self.process.exit_status,
                ended_at=time.time(),
            )
            await self.diagnose(end, started)
        else:
            self.write(state=state.DRAINING, reason=end.reason, message=end.message)
            if started and not self.process.exited.is_set():
                self.process.terminate()
                grace = GRACE_LOADING_S if loading else GRACE_S
                await asyncio.wait(
                    [asyncio.ensure_future(self.process.exited.wait())], timeout=grace
                )
        left = await self.end_tree() if started else []
        notes = [f"still alive: pid {pid}" for pid in left]
        if started and self.gpus_before:
            notes += await self.memory_not_back()
        self.write(
            state=state.FAILED if left else end.state,
            message="; ".join([end.message, *notes]),
            exit_status=self.process.exit_status,
            ended_at=self.state.ended_at or time.time(),
            settled=True,
        )

    async def end_tree(self) -> list[int]:
        """Kill what is left and remove its segments; the pids that are still alive."""
        self.record_tree()
        await self.process.kill_tree()
        await self.process.close()
        session = self.process.engine.pid if self.process.engine else None
        recorded = [process for process in (self.process.engine, *self.state.tree) if process]
        left = await asyncio.to_thread(
            lambda: kill(
                [stat.identity for stat in tree_of(recorded, session, [self.dir.log_file])],
                timeout=3,
            )
        )
        removed = segments.remove(self.state.segments)
        if removed:
            log.info("removed /dev/shm segments: %s", ", ".join(removed))
        return [process.pid for process in left]

    async def memory_not_back(self) -> list[str]:
        """The driver needs a moment to free a killed process's memory; what stays is named."""
        deadline = time.monotonic() + 5
        while held := gpus.memory_returned(
            self.gpus_before, await asyncio.to_thread(gpus.list_gpus)
        ):
            if time.monotonic() > deadline:
                return [f"GPU memory has not come back: {item}" for item in held]
            await asyncio.sleep(0.25)
        return []

    async def diagnose(self, end: End, started: bool) -> None:
        """Evidence and diagnosis, before anything of the failure is removed."""
        if not started:
            return
        try:
            from airflow_provider_vllm.server.postmortem import examine

            found = await asyncio.to_thread(examine, self.dir, self.order, self.state)
            self.write(diagnosis=found)
        except Exception:
            log.exception("the failure could not be diagnosed")


def main(argv: list[str]) -> int:
    directory = GenerationDir(Path(argv[1]))
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stdout,
    )
    asyncio.run(Supervisor(directory).run())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
