"""Rules that know a whole kind of failure, and are asked only where no other rule knows it."""

# ruff: noqa: E501 (log lines stay whole)

from __future__ import annotations

from airflow_provider_vllm.diagnosis.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        id="structured_output_failed",
        group="request",
        pattern=r"^\S",
        frames=r"(?:structured_output|guided_decoding|xgrammar|outlines(?:_core)?|llguidance)/\S*(?:\n[^\n]*){0,4}$",
        explanation="The engine failed while it made or followed the grammar of a request.",
        first_action="Leave that request's schema out; upgrade vLLM, since one request should not end the engine.",
        launch=True,
        request=False,
        confidence=0.8,
        examples=(
            "(EngineCore pid=7) ERROR 03-16 12:28:39 [core.py:340] EngineCore encountered a fatal error.\n"
            "(EngineCore pid=7) ERROR 03-16 12:28:39 [core.py:340] Traceback (most recent call last):\n"
            '(EngineCore pid=7) ERROR 03-16 12:28:39 [core.py:340]   File "/srv/vllm/v1/structured_output/request.py", line 90, in get_structured_output_key\n'
            "(EngineCore pid=7) ERROR 03-16 12:28:39 [core.py:340] ValueError: No valid structured output parameter found",
        ),
    ),
    Rule(
        id="invalid_engine_argument",
        group="model_config",
        pattern=r"^TypeError: Error: --|validation errors? for (?P<class>\w+)[^\n]*\n+\s*(?P<what>(?:Value error|Assertion failed|Input should|Unexpected keyword|Field required|[\w.]+\n\s+)[^\n]*)|Value error, (?P<value>[^\n]+)|^(?:\w+\.)*(?:ValueError|NotImplementedError|VLLMValidationError|AssertionError|RuntimeError): (?=[^\n]*(?:(?:is|are) (?:only|not|currently not|not yet) (?:supported|compatible|available|implemented)\b|only [^\n]{1,80} (?:is|are) supported|(?:not|isn't|doesn't) (?:supported|support|compatible) (?:with|for|in|on|by|when|yet|the)\b|does not support|must be (?:one of|in|greater|less|between|set|at least|positive|divisible)|should be (?:one of|greater|less|between|set)|[Pp]lease (?:set|use|specify|upgrade|disable|enable)|[Uu]nsupported|[Ii]nvalid (?:value|choice|argument)|not supported\.?$))(?![^\n]*\binput tensor)",
        explanation="vLLM refuses the configuration: the root line says which part.",
        first_action="Change that one argument as the root line says.",
        launch=False,
        request=None,
        confidence=0.75,
        examples=(
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig\n"
            "  Value error, max_num_partial_prefills must be at least 1. [type=value_error]",
        ),
    ),
)
