"""Text with a terminal's escape sequences in; plain text out.

vLLM colours process, level, time and file of each line apart where its stream is a terminal, or
VLLM_LOGGING_COLOR or FORCE_COLOR asks for it; uvicorn colours the level. What copies a log may write
the escape character in words (JSON, rsyslog), or drop it and leave the rest ("[0;36m"): those go too.
"""

from __future__ import annotations

import re

_SEQUENCE = (
    r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[()][A-Z0-9])"
    r"|(?:\\u001[bB]|\\x1[bB]|\\033|#033|\^\[)\[[0-9;?]*[A-Za-z]"
    r"|\[(?:[01];)?(?:[01]|3[0-7]|9[0-7])m"
)
_TEXT = re.compile(_SEQUENCE)
_BYTES = re.compile(_SEQUENCE.encode())
_SIGNS = ("\x1b", "[0m", "0;0m")  # nothing stays coloured: each of them ends one
_BYTE_SIGNS = tuple(sign.encode() for sign in _SIGNS)


def plain(text: str) -> str:
    """The text without colours; the text itself where it has none."""
    return _TEXT.sub("", text) if any(sign in text for sign in _SIGNS) else text


def plain_bytes(block: bytes) -> bytes:
    """The same for bytes of whole lines."""
    return _BYTES.sub(b"", block) if any(sign in block for sign in _BYTE_SIGNS) else block
