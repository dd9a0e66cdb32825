"""A Diagnosis in; the texts that people read, out: one short, one full, with or without colour."""

from __future__ import annotations

from airflow_provider_vllm.diagnosis.rule import Diagnosis

LINE_CHARS = 600

_RED, _GREEN, _YELLOW, _BOLD, _DIM, _END = (
    "\x1b[31m",
    "\x1b[32m",
    "\x1b[33m",
    "\x1b[1m",
    "\x1b[2m",
    "\x1b[0m",
)
_TONES = {"failed": _RED, "healthy": _GREEN, "stopped": _GREEN}


def short_text(diagnosis: Diagnosis) -> str:
    """Two or three sentences without line breaks in the log's own line."""
    parts = [f"{diagnosis.explanation} ({diagnosis.group}/{diagnosis.cause})"]
    if diagnosis.root_line is not None:
        who = f" in {diagnosis.process}" if diagnosis.process else ""
        parts.append(
            f"Root line {diagnosis.root_line_number}{who}: {_cut(diagnosis.root_line.strip(), 300)}"
        )
    parts.append(f"First: {diagnosis.first_action}")
    return "\n".join(parts)


def full_text(diagnosis: Diagnosis, *, colour: bool = False) -> str:
    """Verdict, cause, root line with its surroundings, what only repeats it, action, retry."""
    paint = _Paint(colour)
    tone = _TONES.get(diagnosis.verdict, _YELLOW)
    lines = [
        f"{paint('Verdict', _BOLD)}: {paint(diagnosis.verdict, tone)}"
        f" - {diagnosis.group}/{diagnosis.cause} (confidence {diagnosis.confidence:.2f})",
        f"{paint('Cause', _BOLD)}: {diagnosis.explanation}",
    ]
    if diagnosis.root_line is not None:
        who = diagnosis.process or "a process that the line does not name"
        lines.append(f"{paint('Root line', _BOLD)}: {diagnosis.root_line_number}, written by {who}")
        lines.extend(_context(diagnosis, paint))
    elif diagnosis.verdict == "failed":
        lines.append(f"{paint('Root line', _BOLD)}: none, the cause stands in no line of this log")
    if diagnosis.wrapper_lines:
        lines.append(f"{paint('Only repeat it', _BOLD)}:")
        lines.extend(f"    {_cut(line.strip(), 160)}" for line in diagnosis.wrapper_lines)
    lines.append(f"{paint('First action', _BOLD)}: {diagnosis.first_action}")
    if diagnosis.remedy:
        change = ", ".join(f"{key}={value}" for key, value in diagnosis.remedy.items())
        lines.append(f"{paint('Remedy', _BOLD)}: engine_args {change}")
    if diagnosis.verdict not in ("healthy", "stopped"):
        lines.append(f"{paint('Retry', _BOLD)}: {_retry(diagnosis)}")
    lines.extend(f"{paint('Note', _BOLD)}: {note}" for note in diagnosis.notes)
    return "\n".join(lines)


class _Paint:
    def __init__(self, colour: bool) -> None:
        self.colour = colour

    def __call__(self, text: str, tone: str) -> str:
        return f"{tone}{text}{_END}" if self.colour else text


def _context(diagnosis: Diagnosis, paint: _Paint) -> list[str]:
    around = diagnosis.context or ((diagnosis.root_line_number or 0, diagnosis.root_line or ""),)
    lines = []
    for number, line in around:
        root = number == diagnosis.root_line_number
        shown = f"{'  > ' if root else '    '}{number:>6}  {_cut(line, LINE_CHARS)}"
        lines.append(paint(shown, _BOLD if root else _DIM))
    return lines


def _retry(diagnosis: Diagnosis) -> str:
    launch = (
        "starting the server again can help"
        if diagnosis.retry_launch
        else ("starting the server again unchanged cannot help")
    )
    if diagnosis.retry_request is None:
        return f"{launch}."
    request = "can" if diagnosis.retry_request else "cannot"
    return f"{launch}; sending the same request again {request}."


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 4] + " ..."
