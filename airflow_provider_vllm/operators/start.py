"""The setup task: a ServerSpec goes in, the handle of a running server comes out through XCom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import BaseOperator

from airflow_provider_vllm import worker
from airflow_provider_vllm.exceptions import InvalidInput, NoFreeGpu, PreflightFailed, StartFailed
from airflow_provider_vllm.names import refuse_misplaced
from airflow_provider_vllm.operators.gpu_wait import reschedule
from airflow_provider_vllm.operators.interrupt import Interruptible
from airflow_provider_vllm.operators.literals import Literals, naming
from airflow_provider_vllm.operators.publish import publish
from airflow_provider_vllm.operators.spec_template import SpecTemplate, TakesSpec
from airflow_provider_vllm.policies.retry import VllmRetryPolicy
from airflow_provider_vllm.spec import ServerSpec

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.definitions.retry_policy import RetryPolicy

    from airflow_provider_vllm.server.handle import ServerHandle
    from airflow_provider_vllm.server.state import GenerationDir


class StartVllmServerOperator(TakesSpec, Interruptible, BaseOperator):
    """Start a vLLM server on this worker and return its handle.

    :param spec: a ServerSpec or a dict of its fields; the dict is templated.
    :param wait_for_ready: False returns as soon as the server's supervisor runs; wait with a
        VllmServerReadySensor then.
    :param apply_remedy: let the next attempt change the one engine argument that the diagnosis of a failed
        one names; both launches are logged.

    The task fails with the diagnosis when the server can't be started, and is retried (`retries` is 2
    where nothing else says otherwise). It is rescheduled while no GPU is free. XCom: the handle, and key
    `diagnosis` after a failed start.
    """

    template_fields: Sequence[str] = ("spec",)
    template_fields_renderers = {"spec": "json"}  # noqa: RUF012 - Airflow's own attribute
    ui_color = "#d8f0e0"

    def __init__(
        self,
        *,
        spec: ServerSpec | Mapping[str, Any],
        wait_for_ready: bool = True,
        apply_remedy: bool = False,
        retries: int = 2,
        retry_policy: RetryPolicy | None = VllmRetryPolicy(),  # noqa: B008 - immutable; read from the signature for mapped tasks
        **kwargs: Any,
    ) -> None:
        with naming(type(self).__name__, str(kwargs.get("task_id"))):
            refuse_misplaced(kwargs, self.places)
        super().__init__(retries=retries, retry_policy=retry_policy, **kwargs)
        self.spec = SpecTemplate.of(spec, self)
        with naming(type(self).__name__, self.task_id):
            self.check_arguments(
                {"spec": self.spec.fields}, Literals(self.get_dag()), complete=True
            )
        self.wait_for_ready = wait_for_ready
        self.apply_remedy = apply_remedy

    def execute(self, context: Context) -> dict[str, Any]:
        spec = self.spec.build()
        self._refuse_pods()
        try:
            return self._start(spec, context).to_json()
        except NoFreeGpu as exc:
            reschedule(exc, spec.gpu_wait_timeout, context, self.log)
        except (PreflightFailed, StartFailed) as exc:
            publish(exc, context, self.log)
            raise

    def _start(self, spec: ServerSpec, context: Context) -> ServerHandle:
        from airflow_provider_vllm.server.control import ControlClient, token_for
        from airflow_provider_vllm.server.launch import launch
        from airflow_provider_vllm.server.links import ask_to_stop
        from airflow_provider_vllm.server.start import start

        root, options = worker.state_root(), worker.launch_options(spec, context)
        launched: list[tuple[ServerHandle, GenerationDir]] = []

        def abandon() -> None:
            if launched:
                ask_to_stop(*launched[-1])

        with self.interruptible(abandon):
            if self.wait_for_ready:
                running = start(
                    spec,
                    worker.server_id(context),
                    root,
                    options,
                    report=self.log.info,
                    apply_remedy=self.apply_remedy,
                    on_launch=lambda handle, directory: launched.append((handle, directory)),
                )
                running.control.release()
                return running.handle
            handle = launch(spec, worker.server_id(context), root, options)
            directory = handle.directory(root)
            assert directory is not None
            launched.append((handle, directory))
            ControlClient(
                handle.control_url, token_for(directory.key() or "", handle.nonce)
            ).release()
            self.log.info("server %s is starting, log %s", handle.server_id, directory.log_file)
            return handle

    def _refuse_pods(self) -> None:
        if worker.in_kubernetes_pod(self.executor):
            raise InvalidInput(
                "StartVllmServerOperator runs with KubernetesExecutor: the server would die with the start "
                "task's pod. Use VllmBatchOperator(spec=...), which has the server inside its own task, or an "
                "executor whose workers stay."
            )
