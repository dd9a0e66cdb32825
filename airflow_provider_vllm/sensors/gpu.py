"""Waiting for free GPUs on the worker that runs the sensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import BaseSensorOperator

from airflow_provider_vllm import worker
from airflow_provider_vllm.exceptions import InvalidInput, NoFreeGpu
from airflow_provider_vllm.operators.literals import naming

if TYPE_CHECKING:
    from airflow.sdk import Context

GIB = 1024**3


class GpuAvailableSensor(BaseSensorOperator):
    """Wait until `count` GPUs of this worker are free, each with `min_free_gib` GiB of free memory.

    Free means: no server of this provider holds its lock. Nothing is reserved: a start that comes
    later takes the lock itself, and is rescheduled when somebody was faster. Fails at once on a
    worker that has fewer GPUs, no driver, or one that does not answer.
    """

    ui_color = "#e8f0d8"

    def __init__(
        self,
        *,
        count: int = 1,
        min_free_gib: float = 0,
        mode: str = "reschedule",
        poke_interval: float = 30,
        **kwargs: Any,
    ) -> None:
        super().__init__(mode=mode, poke_interval=poke_interval, **kwargs)
        with naming(type(self).__name__, self.task_id):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise InvalidInput(f"count is {count!r}: give a number of GPUs from 1.")
            if not isinstance(min_free_gib, (int, float)) or not min_free_gib >= 0:
                raise InvalidInput(
                    f"min_free_gib is {min_free_gib!r}: give a number of GiB from 0."
                )
        self.count = count
        self.min_free_gib = min_free_gib

    def poke(self, context: Context) -> bool:
        from airflow_provider_vllm.server import gpu_locks, gpus

        listed = gpus.list_gpus()
        choice = gpus.choose(
            listed,
            self.count,
            locked=gpu_locks.locked(worker.state_root().locks),
            min_free_bytes=int(self.min_free_gib * GIB),
        )
        if not isinstance(choice, gpus.Shortage):
            self.log.info("free: %s", ", ".join(choice))
            return True
        if not choice.waiting_helps:
            raise NoFreeGpu(gpus.explain(choice, listed))
        self.log.info("%s", choice)
        return False
