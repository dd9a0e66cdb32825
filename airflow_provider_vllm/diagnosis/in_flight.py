"""The records of a log in; the shape of what the engine worked on when it died, out.

vLLM's engine (0.8.3 and later) writes its last scheduler step into the log when a step raises. Of
that only numbers are taken: no text, no token, no id of a request. Earlier releases, an engine that
was killed, and one that had nothing to do leave none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from airflow_provider_vllm.diagnosis.logs import Record
from airflow_provider_vllm.diagnosis.reader import LINE_CHARS

MOST = 64
"""So many requests of each kind are listed; all are counted."""

_DUMP = "Dumping scheduler output for model execution:"
_STATS = "Dumping scheduler stats:"
_NEW = re.compile(
    r"NewRequestData\(req_id=(?P<id>[^,()]+),\s?prompt_token_ids_len=(?P<prompt>\d+|None),"
    r"(?P<rest>.*?),\s?num_computed_tokens=(?P<computed>\d+),\s?lora_request=(?P<lora>None|.)"
)
_MAX_TOKENS = re.compile(r"ignore_eos=\w+, max_tokens=(\d+)")
_MEDIA = re.compile(r"\bmm_(?:features|kwargs|inputs|hashes)=\[(?!\])")
_CACHED = re.compile(
    r"CachedRequestData\(req_ids=\[(?P<ids>[^\]]*)\].*?num_computed_tokens=\[(?P<computed>[\d, ]*)\]"
    r"(?:,\s?num_output_tokens=\[(?P<output>[\d, ]*)\])?"
)
# Up to 0.9 each running request stands alone.
_CACHED_ALONE = re.compile(
    r"CachedRequestData\(req_id='(?P<id>[^']+)',.*?num_computed_tokens=(?P<computed>\d+)"
)
_SCHEDULED = re.compile(r"num_scheduled_tokens=\{(?P<each>[^}]*)\}")
_TOTAL = re.compile(r"total_num_scheduled_tokens=(\d+)")
_STAT = re.compile(
    r"\b(?P<name>num_running_reqs|num_waiting_reqs|kv_cache_usage|gpu_cache_usage)=(?P<value>[\d.e-]+)"
)
_NAMES = {
    "num_running_reqs": "running",
    "num_waiting_reqs": "waiting",
    "kv_cache_usage": "kv_cache_usage",
    "gpu_cache_usage": "kv_cache_usage",
}


def request_in_flight(records: Iterable[Record]) -> dict[str, Any]:
    """Counts and sizes of the requests in the first dump of the log, or `{"missing": reason}`.

    `new` are requests whose prompt came with this step, `going_on` those that were being answered;
    each with its tokens: of the prompt, computed so far, scheduled in this step, asked for at most.
    A very long dump is `cut`: then `running` has the true number.
    """
    kept = list(records)
    at = next((n for n, record in enumerate(kept) if _DUMP in record.text), None)
    if at is None:
        return {
            "missing": "the engine wrote no scheduler step into the log: it was killed, had nothing "
            "to do, failed before it served, or is older than vLLM 0.8.3"
        }
    dump = kept[at].text
    if dump.rstrip().endswith(_DUMP) and at + 1 < len(kept):  # 0.8 puts it on a line of its own
        dump = kept[at + 1].text
    scheduled = _scheduled(dump)
    new = [_new(found, scheduled) for found in _NEW.finditer(dump)]
    going_on = _going_on(dump, scheduled)
    total = _TOTAL.search(dump)
    return {
        "line": kept[at].number,
        "requests": len(new) + len(going_on),
        "cut": len(dump) > LINE_CHARS // 2 and not dump.endswith(")"),
        "new": new[:MOST],
        "going_on": going_on[:MOST],
        "scheduled_tokens": int(total[1]) if total else None,
        **_stats(kept[at:]),
    }


def _scheduled(dump: str) -> dict[str, int]:
    """Tokens of this step by request id; the ids stay inside this module."""
    found = _SCHEDULED.search(dump)
    pairs = (pair.rpartition(":") for pair in found["each"].split(",")) if found else ()
    return {
        name.strip().strip("'"): int(tokens)
        for name, _, tokens in pairs
        if tokens.strip().isdigit()
    }


def _new(found: re.Match[str], scheduled: dict[str, int]) -> dict[str, Any]:
    most = _MAX_TOKENS.search(found["rest"])
    return {
        "prompt_tokens": int(found["prompt"]) if found["prompt"] != "None" else None,
        "computed_tokens": int(found["computed"]),
        "scheduled_tokens": scheduled.get(found["id"].strip("'")),
        "max_tokens": int(most[1]) if most else None,
        "media": _MEDIA.search(found["rest"]) is not None,
        "lora": found["lora"] != "None",
    }


def _going_on(dump: str, scheduled: dict[str, int]) -> list[dict[str, Any]]:
    together = _CACHED.search(dump)
    if together is None:
        return [
            {
                "computed_tokens": int(found["computed"]),
                "scheduled_tokens": scheduled.get(found["id"]),
            }
            for found in _CACHED_ALONE.finditer(dump)
        ]
    ids = [name.strip().strip("'") for name in together["ids"].split(",") if name.strip()]
    computed, output = _numbers(together["computed"]), _numbers(together["output"])
    return [
        {
            "computed_tokens": computed[n] if n < len(computed) else None,
            "output_tokens": output[n] if n < len(output) else None,
            "scheduled_tokens": scheduled.get(name),
        }
        for n, name in enumerate(ids)
    ]


def _numbers(text: str | None) -> list[int]:
    return [int(part) for part in (text or "").split(",") if part.strip()]


def _stats(after: list[Record]) -> dict[str, float]:
    text = next((record.text for record in after[:4] if _STATS in record.text), "")
    return {_NAMES[found["name"]]: float(found["value"]) for found in _STAT.finditer(text)}
