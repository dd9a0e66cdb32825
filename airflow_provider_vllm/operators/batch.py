"""The work task: prompts and a way to a server go in, answers or a manifest come out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import BaseOperator

from airflow_provider_vllm import worker
from airflow_provider_vllm.exceptions import BatchFailed, NoFreeGpu, ServerError
from airflow_provider_vllm.names import refuse_misplaced
from airflow_provider_vllm.operators.batch_arguments import (
    ARGUMENTS,
    PLACES,
    build,
    check,
    path_text,
)
from airflow_provider_vllm.operators.gpu_wait import reschedule
from airflow_provider_vllm.operators.interrupt import Interruptible
from airflow_provider_vllm.operators.literals import Literals, naming
from airflow_provider_vllm.operators.publish import publish
from airflow_provider_vllm.operators.spec_template import SpecTemplate, TakesSpec
from airflow_provider_vllm.policies.retry import VllmRetryPolicy
from airflow_provider_vllm.spec import ServerSpec

if TYPE_CHECKING:
    from airflow.sdk import Context, XComArg
    from airflow.sdk.definitions.retry_policy import RetryPolicy

    from airflow_provider_vllm.batch.run import BatchResult
    from airflow_provider_vllm.batch.spec import BatchSpec
    from airflow_provider_vllm.server.foreign import ForeignEndpoint
    from airflow_provider_vllm.server.links import OwnServer, SharedServer


AnyPath = str | os.PathLike[str]


class VllmBatchOperator(TakesSpec, Interruptible, BaseOperator):
    """Run a batch of prompts on a vLLM server.

    The server, exactly one of:

    :param spec: a ServerSpec or a dict of its fields: this task starts it and ends it.
    :param server: the handle from StartVllmServerOperator.
    :param vllm_conn_id: a connection of type `vllm` to a server that somebody else runs.

    The rows, exactly one of:

    :param prompts: a list of strings, chat messages or OpenAI batch rows (a list, or another task's output).
    :param input_path: file, URL or glob, or a list of them; JSONL, CSV, Parquet or text.

    :param output_path: the results file; needed with `input_path`.
    :param endpoint: `chat` (default), `completions`, `embeddings` and others, or their URL path.
    :param sampling: sampling parameters of every row (`temperature`, `max_tokens`, ...); a row's own win.
    :param batch: further fields of `airflow_provider_vllm.batch.spec.BatchSpec` by name.
    :param row_offset: number of the first row, as `airflow_provider_vllm.batch.shards.split` gives it.
    :param server_restarts: how often in a row a lost server is started again; one that has served for ten
        minutes counts as a new one.
    :param apply_remedy: as in StartVllmServerOperator, for `spec`.

    A literal argument that is wrong raises InvalidInput while the DAG file is read; what is templated, or
    another task's output, is judged when the task runs.

    Returns the answers in input order for `prompts` without `output_path` (None where a row failed),
    else the manifest. XCom key `manifest` holds the manifest in both cases, `diagnosis` why a server failed.
    """

    template_fields: Sequence[str] = (
        "spec",
        "server",
        "vllm_conn_id",
        "prompts",
        "input_path",
        "output_path",
        "sampling",
        "batch",
    )
    template_fields_renderers = {"spec": "json", "sampling": "json", "batch": "json"}  # noqa: RUF012 - Airflow's own attribute
    ui_color = "#d8e4f0"
    places = PLACES

    def __init__(
        self,
        *,
        spec: ServerSpec | Mapping[str, Any] | None = None,
        server: Mapping[str, Any] | XComArg | None = None,
        vllm_conn_id: str | None = None,
        prompts: Sequence[Any] | XComArg | None = None,
        input_path: AnyPath | Sequence[AnyPath] | None = None,
        output_path: AnyPath | None = None,
        endpoint: str = "chat",
        sampling: Mapping[str, Any] | None = None,
        batch: Mapping[str, Any] | None = None,
        row_offset: int = 0,
        server_restarts: int = 2,
        apply_remedy: bool = False,
        retries: int = 2,
        retry_policy: RetryPolicy | None = VllmRetryPolicy(),  # noqa: B008 - immutable; read from the signature for mapped tasks
        **kwargs: Any,
    ) -> None:
        with naming(type(self).__name__, str(kwargs.get("task_id"))):
            refuse_misplaced(kwargs, self.places)
        super().__init__(retries=retries, retry_policy=retry_policy, **kwargs)
        self.spec = None if spec is None else SpecTemplate.of(spec, self)
        # XComArgs are resolved before `execute()`.
        self.server: Any = server
        self.vllm_conn_id = vllm_conn_id
        self.prompts: Any = prompts
        self.input_path = path_text(input_path)
        self.output_path = path_text(output_path)
        self.endpoint = endpoint
        self.sampling = sampling
        self.batch = batch
        self.row_offset = row_offset
        self.server_restarts = server_restarts
        self.apply_remedy = apply_remedy
        with naming(type(self).__name__, self.task_id):
            self.check_arguments(self._arguments(), Literals(self.get_dag()), complete=True)

    @classmethod
    def check_arguments(
        cls, arguments: Mapping[str, Any], literals: Literals, *, complete: bool
    ) -> None:
        check(arguments, literals, complete=complete)

    def execute(self, context: Context) -> Any:
        from airflow_provider_vllm.batch.run import check_inputs, run_batch

        spec = build(self._arguments())
        journal_dir = _journal_dir(spec, context)
        with self.interruptible():  # a large input is read to its end
            checked = check_inputs(
                spec, to_path=to_path, journal_dir=journal_dir, owner=worker.server_id(context)
            )
        link = self._link(context)
        try:
            with self.interruptible(link.abandon):
                result = run_batch(
                    spec,
                    link,
                    journal_dir=journal_dir,
                    log=logging.getLogger(__name__),
                    to_path=to_path,
                    checked=checked,
                    owner=worker.server_id(context),
                    run=worker.run_label(context),
                )
        except NoFreeGpu as exc:
            limit = self._server_spec().gpu_wait_timeout
            reschedule(exc, limit, context, self.log, anew=link.connected)
        except (BatchFailed, ServerError) as exc:
            publish(exc, context, self.log)
            if isinstance(exc, BatchFailed) and exc.manifest:
                context["ti"].xcom_push(key="manifest", value=exc.manifest)
            if isinstance(exc, BatchFailed) and exc.errors:
                context["ti"].xcom_push(key="errors", value=exc.errors)
            raise
        finally:
            link.close()
        return self._deliver(result, spec, context)

    def _deliver(self, result: BatchResult, spec: BatchSpec, context: Context) -> Any:
        from airflow.sdk import Asset, AssetAlias

        manifest = result.manifest.to_json()
        for outlet in self.outlets or ():
            if not isinstance(outlet, (Asset, AssetAlias)):
                continue  # something of a plugin's, for which Airflow keeps no events
            context["outlet_events"][outlet].extra = {"manifest": manifest}
        context["ti"].xcom_push(key="manifest", value=manifest)
        if spec.prompts is not None and not spec.output_path:
            if result.errors:
                context["ti"].xcom_push(key="errors", value=result.errors)
            return result.answers
        for name in ("output_path", "errors_path", "manifest_path"):
            if manifest[name]:
                self.log.info("%s: %s", name, manifest[name])
        return manifest

    def _arguments(self) -> dict[str, Any]:
        """What `check` and `build` look at, rendered or not."""
        spec = None if self.spec is None else self.spec.fields
        return {"spec": spec, **{name: getattr(self, name) for name in ARGUMENTS}}

    def _server_spec(self) -> ServerSpec:
        """Of the server that this task starts, or starts again."""
        from airflow_provider_vllm.server.handle import ServerHandle

        if self.spec is not None:
            return self.spec.build()
        return ServerSpec.of(ServerHandle.of(self.server).spec)

    def _link(self, context: Context) -> OwnServer | SharedServer | ForeignEndpoint:
        from airflow_provider_vllm.server.foreign import ForeignEndpoint
        from airflow_provider_vllm.server.links import OwnServer, SharedServer

        report: Callable[[str], None] = self.log.info
        if self.vllm_conn_id is not None:
            from airflow_provider_vllm.hooks.vllm import VllmHook

            return ForeignEndpoint(VllmHook(self.vllm_conn_id).endpoint(), report=report)
        root = worker.state_root()
        if self.spec is not None:
            spec = self._server_spec()
            return OwnServer(
                spec,
                worker.server_id(context),
                root,
                worker.launch_options(spec, context),
                report=report,
                restarts=self.server_restarts,
                apply_remedy=self.apply_remedy,
            )
        from airflow_provider_vllm.server.handle import ServerHandle

        handle = ServerHandle.of(self.server)
        options = worker.launch_options(self._server_spec(), context)
        return SharedServer(handle, root, options, report=report, restarts=self.server_restarts)


def _journal_dir(spec: BatchSpec, context: Context) -> str:
    """Beside the output, where the retry on another host finds it; else on this worker."""
    if spec.output_path:
        return f"{spec.output_path}.journal"
    return worker.journal_dir(context)


def to_path(text: str) -> Any:
    """A local path, or for a URL (s3://, gs://, ...) Airflow's ObjectStoragePath."""
    from airflow_provider_vllm.batch.sources import local_path

    if "://" not in text or text.startswith("file://"):
        return local_path(text)
    from airflow.providers.common.compat.sdk import ObjectStoragePath

    return ObjectStoragePath(text)
