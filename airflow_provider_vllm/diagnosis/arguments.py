"""Rules: arguments of the launch that vLLM's own parser refuses."""

# ruff: noqa: E501 (log lines stay whole)

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from airflow_provider_vllm.diagnosis.rule import Rule

_PYDANTIC_LINES, _REASON_CHARS = 4, 300


def refused_value(match: re.Match[str], _: Sequence[str], after: Sequence[str]) -> dict[str, str]:
    """The argument and why its value was refused: the rest of argparse's line, or what pydantic says on the lines after it
    (the place of the fault if it names one, then the fault and its type)."""
    reason = match["said"]
    if re.match(r"\d+ validation errors? for ", reason):
        lines = [line.strip() for line in after[:_PYDANTIC_LINES]]
        ends = [at for at, line in enumerate(lines) if " [type=" in line]
        if ends:
            reason = ": ".join(filter(None, lines[: ends[0] + 1])).split(" [type=")[0]
            reason = reason.replace("Value error, ", "")
    name = match["argument"].replace("-", "_")
    return {"argument": name, "reason": _shortened(reason.rstrip(". "))}


def nearest_name(match: re.Match[str], before: Sequence[str], _: Sequence[str]) -> dict[str, str]:
    """The engine argument of vLLM's usage text that an unknown one most resembles, if one does."""
    known = {
        name for line in before for name in re.findall(r"--([a-z][\w-]+)", line) if "[" in line
    }
    for unknown in re.findall(r"--([\w-]+)", match["what"] or ""):
        near = difflib.get_close_matches(unknown.replace("_", "-"), known - {unknown}, 1, 0.75)
        if near:
            return {"nearest": near[0].replace("-", "_")}
    return {}


def _shortened(text: str) -> str:
    return text if len(text) <= _REASON_CHARS else text[: _REASON_CHARS - 4] + " ..."


RULES: tuple[Rule, ...] = (
    Rule(
        id="argument_value_refused",
        group="model_config",
        pattern=r"^[\w./ -]{1,60}: error: argument (?:-\w+/)?(?:--)?(?P<argument>[\w-]+)[^:\n]{0,80}: (?P<said>\S[^\n]*)",
        explanation="vLLM refuses the value of {argument}[: {reason}].",
        first_action="Correct the value of that engine argument, or leave it out.",
        launch=False,
        request=None,
        native=True,
        details=refused_value,
        examples=(
            "vllm serve: error: argument --dtype: invalid choice: 'fp4' (choose from auto, half, float16, bfloat16, float, float32)",
            "api_server.py: error: argument --structured-outputs-config: 1 validation error for StructuredOutputsConfig\n"
            "  Value error, disable_any_whitespace is only supported for xgrammar and guidance backends. [type=value_error, input_value={'disable_any_whitespace': True}, input_type=dict]\n"
            "    For further information visit https://errors.pydantic.dev/2.14/v/value_error",
        ),
        near_misses=("api_server.py: error: unrecognized arguments: --no-such-arg",),
    ),
    Rule(
        id="invalid_cli_argument",
        group="model_config",
        pattern=r"^[\w./ -]{1,60}: error: (?P<what>(?:unrecognized arguments|argument |the following arguments|ambiguous option|invalid choice|expected|unexpected|too few)[^\n]*)|^(?:usage: )?vllm\S*: error: (?P<other>.+)",
        explanation="vLLM refuses an argument of the launch[: {what}][: {other}].",
        first_action="Correct or remove that engine argument[ (the nearest this vLLM knows is {nearest})]; names differ between vLLM releases.",
        launch=False,
        request=None,
        native=True,
        details=nearest_name,
        examples=(
            "api_server.py: error: unrecognized arguments: --no-such-arg",
            "usage: api_server.py [-h] [--max-model-len MAX_MODEL_LEN] [--max-num-seqs MAX_NUM_SEQS]\n"
            "api_server.py: error: unrecognized arguments: --max-model-length 4096",
        ),
        near_misses=(
            "(APIServer pid=7) INFO 11-30 10:00:00 [arg_utils.py:1] error: argument parser ready",
        ),
    ),
)
