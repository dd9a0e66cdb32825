"""What a cell of a table stands for."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from airflow_provider_vllm.batch.cells import messages, parameter, parameters
from airflow_provider_vllm.batch.template import RowError


@pytest.mark.parametrize(
    ("name", "cell", "value"),
    [
        ("seed", "7", 7),
        ("seed", " 007 ", 7),
        ("temperature", "0.5", 0.5),
        ("temperature", "1e-3", 0.001),
        ("temperature", Decimal("0.5"), 0.5),
        ("seed", Decimal("7.00"), 7),
        ("temperature", "nan", None),
        ("temperature", float("nan"), None),
        ("temperature", " ", None),
        ("temperature", None, None),
        ("temperature", "hot", "hot"),  # the server says what is wrong with it
        ("ignore_eos", "True", True),
        ("ignore_eos", "false", False),
        ("top_k", "null", None),
        ("stop", "5", "5"),
        ("stop", '["5", "\\n"]', ["5", "\n"]),
        ("stop", "[", "["),
        ("model", "7", "7"),
        ("user", "1e5", "1e5"),
        ("logit_bias", '{"5": -1}', {"5": -1}),
        ("logit_bias", "{5", "{5"),
        ("stop_token_ids", "[1, 2]", [1, 2]),
        ("stop_token_ids", [1, 2], [1, 2]),
    ],
)
def test_a_parameter(name: str, cell: Any, value: Any) -> None:
    found = parameter(name, cell)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("cell", ["inf", "-Infinity", float("inf"), Decimal("Infinity")])
def test_a_number_that_no_request_can_say(cell: Any) -> None:
    with pytest.raises(RowError, match=r"temperature is -?inf"):
        parameter("temperature", cell)


@pytest.mark.parametrize(
    ("value", "table", "found"),
    [
        ({"seed": None, "top_p": 1}, True, {"top_p": 1}),
        ({"seed": None, "top_p": 1}, False, {"seed": None, "top_p": 1}),
        ({"seed": float("nan"), "stop": "5"}, False, {"stop": "5"}),
        ('{"seed": 7, "stop": "5"}', True, {"seed": 7, "stop": "5"}),
        ([("seed", 7)], True, {"seed": 7}),
        ("fast", True, {}),
        ([1], True, {}),
        (5, False, {}),
    ],
)
def test_parameters(value: Any, table: bool, found: dict[str, Any]) -> None:
    assert parameters(value, table) == found


@pytest.mark.parametrize(
    ("value", "table", "found"),
    [
        ('[{"role": "user", "content": "a"}]', True, [{"role": "user", "content": "a"}]),
        ("[not JSON", True, "[not JSON"),
        ("plain", False, "plain"),
        (
            [{"role": "user", "name": None, "content": [{"text": "a", "image_url": None}]}],
            True,
            [{"role": "user", "content": [{"text": "a"}]}],
        ),
        ([{"role": "user", "name": None}], False, [{"role": "user", "name": None}]),
    ],
)
def test_messages(value: Any, table: bool, found: Any) -> None:
    assert messages(value, table) == found


@pytest.mark.parametrize("text", ["{'seed': 7}", ' {"seed": 7', "{seed}"])
def test_parameters_that_are_almost_json(text: str) -> None:
    """A row must not go without them."""
    with pytest.raises(RowError, match=r"params begins with \{ and is not JSON") as caught:
        parameters(text, True)
    assert (caught.value.code, caught.value.field) == ("invalid_json", "params")


@pytest.mark.parametrize("text", ["[{'role': 'user', 'content': 'a'}]", ' [ {"role": "user"}'])
def test_messages_that_are_almost_json(text: str) -> None:
    """They must not be sent as one prompt."""
    with pytest.raises(RowError, match=r"messages begins with \[ and is not JSON"):
        messages(text, True)
