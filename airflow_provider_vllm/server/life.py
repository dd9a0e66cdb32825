"""One life of vLLM, from its launch to the first thing that ends it: an order and a port go in, an End comes out.

Several watchers look at the process, its guard, its log, its answers, its limits and its tree; the first
that sees an end decides. Nothing here ends a process: the supervisor does, after it has written the
end down.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_provider_vllm.server import nvml, probe, segments, state, temp
from airflow_provider_vllm.server.guarded import GuardedProcess
from airflow_provider_vllm.server.lease import Lease
from airflow_provider_vllm.server.logwatch import LogWatch, News
from airflow_provider_vllm.server.order import Order, url_of
from airflow_provider_vllm.server.processes import ProcessId, descendants
from airflow_provider_vllm.server.record import Record

if TYPE_CHECKING:
    import aiohttp

LOG_S = 0.2
PROBE_S = 0.2
HEALTH_S = 0.5
HEALTH_TIMEOUT_S = 5.0
LIMITS_S = 0.5
METRICS_S = 5.0
TREE_S = 0.5
TREE_READY_S = 10.0
# An API server on a busy host may need seconds for an answer; silence of this length is a freeze.
FROZEN_S = 30.0
# After a fatal line vLLM exits by itself: its status is worth a short wait.
LAST_WORDS_S = 0.7
LAST_BLOCKS = 40

log = logging.getLogger("supervisor")


@dataclass(frozen=True)
class End:
    """Why a life ended: `state` is FAILED or STOPPED, `reason` as in ServerState."""

    state: str
    reason: str
    message: str


@dataclass
class Terms:
    """How long the server may live: its lease, and the process with which it ends (None: nobody's)."""

    lease: Lease
    owner: ProcessId | None

    def renew(self, idle_timeout: float | None = None) -> None:
        self.lease = self.lease.renew(time.monotonic(), idle_timeout)

    def release(self) -> None:
        self.owner = None
        self.renew()

    @property
    def until(self) -> float:
        """When the lease ends, in seconds since the epoch."""
        return round(time.time() + self.lease.until - time.monotonic(), 1)


class Life:
    """`run()` starts vLLM and returns its End; `process` is what the supervisor then takes down."""

    def __init__(
        self,
        order: Order,
        key: str,
        record: Record,
        terms: Terms,
        port: int,
        devices: Mapping[str, str],
    ) -> None:
        self.order, self.spec, self.key = order, order.spec, key
        self.record, self.terms = record, terms
        self.port, self.devices = port, devices
        self.process = GuardedProcess()
        self.news = LogWatch(record.dir.log_file)
        self.port_was_taken = False
        self._ending: asyncio.Future[End] = asyncio.get_running_loop().create_future()

    def finish(self, end: End) -> None:
        """End this life; the first reason stands."""
        if not self._ending.done():
            self._ending.set_result(end)

    def fail(self, reason: str, message: str) -> None:
        self.finish(End(state.FAILED, reason, message))

    async def run(self, lock_fds: tuple[int, ...]) -> End:
        # It may ask the interpreter what it has, which takes a moment.
        command = await asyncio.to_thread(self.order.command, self.port)
        temporary = temp.make(self.order.nonce, os.environ)
        environ = self.order.environ(os.environ, self.key, {**self.devices, **temporary})
        log.info("starting %s", " ".join(command))
        try:
            await self.process.start(command, environ, self.record.dir.log_file, lock_fds)
        except OSError as exc:
            return End(state.FAILED, "exit", f"vLLM could not be started: {exc}")
        self.record.write(
            state=state.LOADING,
            stage="import",
            base_url=url_of(self.spec.host, self.port),
            guard=self.process.guard,
            engine=self.process.engine,
        )
        watchers = (
            self._watch_exit(),
            self._watch_guard(),
            self._watch_log(),
            self._watch_answers(),
            self._watch_limits(),
            self._watch_tree(),
        )
        tasks = [asyncio.create_task(self._watched(watcher)) for watcher in watchers]
        try:
            return await self._ending
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watched(self, watcher: Coroutine[Any, Any, None]) -> None:
        """A watcher that fails ends the life: a server that nobody watches is worse than none."""
        try:
            await watcher
        except Exception as exc:
            log.exception("a watcher failed")
            self.fail("crash", f"the supervisor failed: {exc!r}")

    @property
    def _loading(self) -> bool:
        return self.record.state.state == state.LOADING

    async def _watch_exit(self) -> None:
        await self.process.exited.wait()
        for _ in range(LAST_BLOCKS):
            if not self._take_news().more:
                break
        if self._loading and self.port_was_taken:
            self.fail("port_taken", f"port {self.port} was taken by another process")
        self.fail("exit", f"vLLM ended with exit status {self.process.exit_status}")

    async def _watch_guard(self) -> None:
        await self.process.guard_gone.wait()
        self.fail("guard_gone", "the guard of the vLLM processes was killed or gave up")

    async def _watch_log(self) -> None:
        while True:
            news = self._take_news()
            if news.fatal:
                log.error("fatal line: %s", news.fatal)
                exited = asyncio.ensure_future(self.process.exited.wait())
                await asyncio.wait([exited], timeout=LAST_WORDS_S)
                exited.cancel()
                self.fail("engine_dead", f"the engine died: {news.fatal[:300]}")
            await asyncio.sleep(0 if news.more else LOG_S)

    def _take_news(self) -> News:
        """Read on in the log, and note what it says of the start."""
        news = self.news.read()
        self.port_was_taken = self.port_was_taken or news.port_taken
        if self._loading and (news.stage or news.progress):
            self.record.write(stage=news.stage or self.record.state.stage, progress=news.progress)
        return news

    async def _watch_answers(self) -> None:
        import aiohttp

        url = url_of(_near(self.spec.host), self.port)
        foreign = 0
        async with aiohttp.ClientSession() as session:
            while (answer := await self._ask(session, url, 2)).verdict != probe.OURS:
                foreign = foreign + 1 if answer.verdict == probe.FOREIGN else 0
                if foreign >= 2:
                    self.fail("port_taken", f"another server answers on {url}: {answer.detail}")
                if answer.verdict == probe.ENGINE_DEAD:
                    self.fail("engine_dead", f"the engine died: {answer.detail}")
                await asyncio.sleep(PROBE_S)
            self.terms.renew()
            self.record.write(state=state.READY, ready_at=time.time(), stage=None, progress=None)
            await asyncio.gather(
                self._watch_health(session, url), self._watch_movement(session, url)
            )

    async def _ask(self, session: aiohttp.ClientSession, url: str, timeout: float) -> probe.Answer:
        return await probe.ask(session, url, self.key, self.spec.served_model_name, timeout)

    async def _watch_health(self, session: aiohttp.ClientSession, url: str) -> None:
        # Silence is counted in rounds of bounded length: a machine that was paused as a whole
        # must not count as a server that went silent.
        silent, now = 0.0, time.monotonic()
        while True:
            answer = await self._ask(session, url, HEALTH_TIMEOUT_S)
            before, now = now, time.monotonic()
            silent += min(now - before, HEALTH_TIMEOUT_S + 2 * HEALTH_S)
            if answer.verdict == probe.OURS:
                silent = 0.0
            elif answer.verdict == probe.ENGINE_DEAD:
                self.fail("engine_dead", f"the engine died: {answer.detail}")
            elif silent > FROZEN_S:
                text = f"the API server has not answered for {silent:.0f} s"
                self.fail("api_frozen", f"{text} ({answer.detail})")
            await asyncio.sleep(HEALTH_S)

    async def _watch_movement(self, session: aiohttp.ClientSession, url: str) -> None:
        """vLLM's counters extend the lease when they move, whoever made them move."""
        moved: float | None = None
        while True:
            seen = await probe.movement(session, url, timeout=5)
            if seen is not None and seen != moved:
                if moved is not None:
                    self.terms.renew()
                moved = seen
            await asyncio.sleep(METRICS_S)

    async def _watch_limits(self) -> None:
        """Start-up time-out, lease, and the process with which the server ends."""
        began = time.monotonic()
        limit = self.spec.startup_timeout
        while True:
            now, terms = time.monotonic(), self.terms
            if self.record.directory_is_gone:
                self.fail("directory_gone", f"{self.record.dir.path} was removed under the server")
            if terms.owner and not terms.owner.alive:
                text = f"the task that started it (pid {terms.owner.pid}) is gone"
                self.finish(End(state.STOPPED, "owner_gone", text))
            if self._loading:
                if now - began > limit:
                    stage = self.record.state.stage
                    self.fail(
                        "timeout", f"not ready after startup_timeout = {limit:g} s, stage {stage}"
                    )
                # A load is bounded by its own time-out; its lease starts when it is ready.
                terms.renew()
            if ended := terms.lease.ended(now):
                self.finish(End(state.STOPPED, ended, _lease_text(ended, terms.lease)))
            await asyncio.sleep(LIMITS_S)

    async def _watch_tree(self) -> None:
        """Record the tree and what it maps, so that others can remove it when the supervisor can't."""
        while True:
            await self.record_tree()
            settled = self.record.state.state == state.READY and len(self.record.state.tree) > 1
            await asyncio.sleep(TREE_READY_S if settled else TREE_S)

    async def record_tree(self) -> None:
        """All of the tree is below the guard, its sub-reaper, and without a guard below us."""

        def look() -> tuple[list[ProcessId], set[str]]:
            below = descendants(os.getpid())
            tree = [stat.identity for stat in below if stat.pid != nvml.asker()]
            return tree, segments.mapped(each.pid for each in tree)

        # In a thread: the maps of a process that hangs in a driver may be a long time coming.
        tree, mapped = await asyncio.to_thread(look)
        self.record.write(
            tree=tuple(each for each in tree if each != self.process.guard),
            segments=tuple(sorted(mapped.union(self.record.state.segments))),
            lease_until=self.terms.until,
        )


def _near(host: str) -> str:
    """The address under which the supervisor itself reaches what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def _lease_text(ended: str, lease: Lease) -> str:
    if ended == "idle":
        return f"nobody used it for idle_timeout = {lease.idle_timeout:g} s"
    return f"it lived for max_lifetime = {lease.max_lifetime or 0:g} s"
