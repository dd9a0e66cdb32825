"""JSON text in, its value out, in which every integer has all its digits.

orjson, which writes, makes a float of an integer beyond 64 bits when it reads, and says nothing; what msgspec keeps of
such a one, orjson then refuses to send. Where a text is wrong, orjson says it better.
"""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

decode = msgspec.json.Decoder().decode


def loads(text: bytes) -> Any:
    """The value of a JSON text. Raises orjson.JSONDecodeError."""
    try:
        return decode(text)
    except RecursionError:
        raise orjson.JSONDecodeError("nested too deep", "", 0) from None
    except msgspec.DecodeError as error:
        orjson.loads(text)
        raise orjson.JSONDecodeError(str(error), "", 0) from None
