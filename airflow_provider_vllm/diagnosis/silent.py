"""What is said of a server where no line of its log names a cause.

Either nothing went wrong (it serves, was stopped, was interrupted), or it died without a word. Then
the exit status, the wrapper lines and the host's evidence are all there is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from airflow_provider_vllm.diagnosis.logs import Record
from airflow_provider_vllm.diagnosis.reader import Life
from airflow_provider_vllm.diagnosis.rule import Diagnosis, Rule
from airflow_provider_vllm.diagnosis.stages import stage_of

_SIGNALS = {
    4: ("native_crash", "an illegal instruction (signal 4)"),
    6: ("native_crash", "an abort (signal 6)"),
    7: ("native_crash", "a bus error (signal 7), often a full /dev/shm"),
    8: ("native_crash", "an arithmetic fault (signal 8)"),
    9: ("killed_from_outside", "SIGKILL"),
    11: ("native_crash", "a segmentation fault (signal 11)"),
}
_NAMED = re.compile(
    r"Worker proc (?P<worker>\S+) died unexpectedly(?: \(exit code: (?P<code>-?\d+|None)\))?"
    r"|Worker (?P<v0>Vllm\w+) pid \d+ died(?:, exit code: (?P<v0_code>-?\d+))?"
    r"|RayWorkerProc rank=(?P<rank>\S+) died unexpectedly"
    r"|Failed core proc\(s\): \{'(?P<engine>\w+)': (?P<engine_code>-?\d+)"
    r"|Engine core proc (?P<old>\S+) died unexpectedly|(?P<core>engine core exited unexpectedly)"
)
# A shell's word for the SIGKILL of its child; vLLM up to 0.10 kills itself after a fatal signal.
_KILLED = re.compile(r"^(?:\S+: line \d+:\s+\d+ )?Killed(?:\s|$)")
_KILLS_ITSELF = "Got fatal signal from worker processes"
# docker compose, a platform's agent, systemd.
_EXITED = re.compile(
    r"(?:^|\s)exited with (?:exit )?(?:code|status) (?P<code>\d+)$"
    r"|Main process exited, code=(?:exited, status=(?P<status>\d+)|\w+, status=(?P<signal>\d+))/"
)
_BROADCAST = "No available shared memory broadcast block found"


def stopped(life: Life) -> Diagnosis:
    """Somebody asked the server to end, and it did."""
    return Diagnosis(
        verdict="stopped",
        group="other",
        cause="orderly_shutdown",
        explanation="The server was asked to stop and shut down in order.",
        first_action="Nothing to do.",
        confidence=0.95 if life.serving is not None else 0.85,
    )


def interrupted(life: Life, rule: Rule | None, signal: int | None = None) -> Diagnosis:
    """Something outside vLLM ended the server: a person, a batch system, a lost session."""
    if rule is not None:
        return Diagnosis(
            verdict="interrupted",
            group=rule.group,
            cause=rule.id,
            explanation=rule.explanation,
            first_action=rule.first_action,
            retry_launch=rule.launch,
            retry_request=rule.request,
            confidence=rule.confidence,
        )
    what = "SIGTERM" if signal == 15 else "Ctrl-C (SIGINT)"
    return Diagnosis(
        verdict="interrupted",
        group="dead_process",
        cause="interrupted",
        explanation=f"The server was ended from outside by {what}; vLLM did nothing wrong.",
        first_action="Find out who ended it (a time limit, a person, a pod's eviction), then start "
        "it again.",
        retry_launch=True,
        retry_request=True,
        confidence=0.9,
    )


def without_failure(life: Life, kept: Sequence[Record], exit_status: int | None) -> Diagnosis:
    """Nothing failed that the log tells of: healthy, stalled, or too little to say."""
    if (stall := _stalled(life, kept)) is not None and exit_status is None:
        return stall
    if life.serving is not None or life.stats or life.finished:
        return Diagnosis(
            verdict="healthy",
            group="other",
            cause="healthy",
            explanation="The server came up and nothing in its log ended it.",
            first_action="Nothing to do.",
            confidence=0.9,
        )
    if exit_status == 0 and life.started is not None:
        return stopped(life)
    if life.started is not None or life.stages:
        last = life.stages[-1] if life.stages else "import"
        return Diagnosis(
            verdict="stalled",
            group="other",
            cause="start_unfinished",
            explanation=f"The log ends during the start (stage: {last}) with no error in it.",
            first_action="See whether the process still runs and its log still grows; if it hangs, "
            "start it once with VLLM_LOGGING_LEVEL=DEBUG.",
            confidence=0.5,
        )
    return Diagnosis(
        verdict="unknown",
        group="other",
        cause="nothing_to_judge",
        explanation="There is nothing in this log that a vLLM server's life can be judged by.",
        first_action="Check that this is the server's log, with both of its streams.",
        confidence=0.2,
    )


def _stalled(life: Life, kept: Sequence[Record]) -> Diagnosis | None:
    waits = [record for record in kept if _BROADCAST in record.text]
    frozen = [
        stats
        for stats in list(life.stats)[-3:]
        if stats.running > 0 and stats.generation == 0 and stats.prompt == 0
    ]
    moved = [stats.number for stats in life.stats if stats.generation + stats.prompt > 0]
    stages = [record.number for record in kept if stage_of(record.text) is not None]
    since = max(life.ready or 0, moved[-1] if moved else 0, stages[-1] if stages else 0)
    late = [record for record in waits if record.number > since]
    if len(late) >= 3 or (late and len(frozen) >= 2):
        return replace(
            Diagnosis(
                verdict="stalled",
                group="communication",
                cause="worker_hang_shm_broadcast",
                explanation="The engine waits for a worker that does not answer: no token moved "
                "while the shared-memory broadcast ring stayed unread.",
                first_action="Find the worker that hangs (py-spy dump of each worker); if all wait "
                "in a collective, start once with NCCL_DEBUG=INFO.",
                retry_launch=True,
                retry_request=True,
                confidence=0.8,
            ),
            root_line=late[0].raw,
            root_line_number=late[0].number,
            process=late[0].process,
        )
    if len(frozen) >= 3:
        return Diagnosis(
            verdict="stalled",
            group="communication",
            cause="no_progress",
            explanation=f"{frozen[-1].running} requests are running and not one token moved in the "
            "last statistics.",
            first_action="Take a py-spy dump of EngineCore and the workers before restarting.",
            retry_launch=True,
            retry_request=True,
            confidence=0.7,
        )
    return None


def was_killed(kept: Sequence[Record]) -> bool:
    """Whether a shell says at the end of the log that the server was killed by somebody else."""
    end = [record.text for record in kept[-20:]]
    itself = any(_KILLS_ITSELF in record.text for record in kept)
    return not itself and any(_KILLED.search(text) for text in end)


def told_exit_status(kept: Sequence[Record]) -> int | None:
    """The exit status that whoever ran the server wrote under its log, if not 0."""
    for record in kept[-3:]:
        found = _EXITED.search(record.text)
        if found and found["signal"]:
            return -int(found["signal"])
        if found and int(found["code"] or found["status"]):
            return int(found["code"] or found["status"])
    return None


def without_cause(
    life: Life,
    kept: Sequence[Record],
    wrapper_lines: tuple[str, ...],
    exit_status: int | None,
    evidence: Mapping[str, Any],
) -> Diagnosis:
    """It died and only wrappers, if anything, say so."""
    process, code = _dead(kept)
    code = code if code is not None else exit_status
    code = -9 if code is None and was_killed(kept) else code
    signal = _number(code)
    if signal in _SIGNALS:
        cause, what = _SIGNALS[signal]
        ended = f"was ended by {what}"
    elif exit_status not in (None, 0) and process is None:
        cause, ended = "died_silently", f"ended with exit status {exit_status}"
    else:
        cause, ended = "died_silently", "died"
    stage = f" during the start (stage: {life.stages[-1]})" if _loading(life) else ""
    diagnosis = Diagnosis(
        verdict="failed",
        group="dead_process",
        cause=cause,
        explanation=f"{process or 'The server'} {ended}{stage}; the cause is not in the log.",
        first_action="Look in the kernel log of the host (dmesg) for oom-kill and Xid lines at that "
        "time, and at the memory limit of the container.",
        process=process,
        wrapper_lines=wrapper_lines,
        retry_launch=True,
        retry_request=True,
        confidence=0.75 if signal in _SIGNALS or process else 0.6,
    )
    return with_evidence(diagnosis, evidence)


def _loading(life: Life) -> bool:
    return life.serving is None and bool(life.stages)


def _number(status: int | None) -> int | None:
    if status is None:
        return None
    if status < 0:
        return -status
    return status - 128 if 128 < status < 160 else None


def _dead(kept: Sequence[Record]) -> tuple[str | None, int | None]:
    """The deepest process that a wrapper names as dead, and its exit status where one is given."""
    name: str | None = None
    code: int | None = None
    for record in kept:
        found = _NAMED.search(record.text)
        if found is None:
            continue
        rank = f"worker rank {found['rank']}" if found["rank"] else None
        worker = found["worker"] or found["v0"] or rank
        engine = found["engine"] or found["old"] or ("EngineCore" if found["core"] else None)
        if worker and (name is None or not name.startswith(("Vllm", "worker"))):
            name = worker
            given = found["code"] or found["v0_code"]
            code = int(given) if given not in (None, "None") else None
        elif engine and name is None:
            name = engine
            code = int(found["engine_code"]) if found["engine_code"] else None
    return name, code


def with_evidence(diagnosis: Diagnosis, evidence: Mapping[str, Any]) -> Diagnosis:
    """Adds what the host's kernel says: an oom-kill explains a silent death, an Xid a CUDA error."""
    kernel = evidence.get("kernel_log")
    if not isinstance(kernel, Mapping):
        return diagnosis
    killed, xids = kernel.get("oom_kills"), kernel.get("xid")
    if killed and diagnosis.root_line is None:
        return replace(
            diagnosis,
            cause="host_oom_killed",
            explanation=f"The host ran out of memory and the kernel killed it: {killed[-1]}",
            first_action="Give the server more host memory, or a smaller model; in a container, "
            "raise its memory limit.",
            retry_launch=False,
            retry_request=None,
            confidence=0.9,
        )
    if xids and diagnosis.group in ("kernel_hardware", "dead_process", "communication"):
        return replace(diagnosis, notes=(*diagnosis.notes, f"The kernel reports: {xids[-1]}"))
    return diagnosis
