"""No digit of an integer is lost on its way from the input to prompt and output."""

from __future__ import annotations

import csv
import json
from decimal import Decimal
from pathlib import Path

import orjson
import pytest
from pyarrow import parquet  # type: ignore[import-untyped]

from airflow_provider_vllm.batch.cells import parameter, parameters
from airflow_provider_vllm.batch.exact import loads
from airflow_provider_vllm.batch.spec import BatchSpec
from tests.batch.helpers import ForeignLink, batch_row, read_rows, run, write_rows

BIG = 123456789012345678901234567890
NUMBERS = [
    BIG,
    -BIG,
    int("9" * 400),
    2**64,
    2**64 - 1,
    2**63,
    -(2**63),
    -(2**63) - 1,
    10**19,
    10**18,
    7,
]


@pytest.mark.parametrize("number", NUMBERS)
def test_integers(number: int) -> None:
    for value in (number, {"a": [{"b": number}]}, {"text": str(number), "x": 0.1}):
        assert loads(json.dumps(value).encode()) == value
        assert type(loads(json.dumps(number).encode())) is int


@pytest.mark.parametrize("before", range(20))
@pytest.mark.parametrize("number", [2**63, 2**64, BIG])
def test_wherever_a_number_stands(number: int, before: int) -> None:
    text = b'{"a": "%b", "b": %d}' % (b"x" * before, number)
    assert loads(text)["b"] == number
    assert type(loads(text)["b"]) is int


@pytest.mark.parametrize("text", [f"{BIG}.5", "1e30", f"0.{BIG}"])
def test_what_is_no_integer_is_read_as_before(text: str) -> None:
    assert loads(text.encode()) == orjson.loads(text)


@pytest.mark.parametrize(
    "text", ["9" * 5000, f"[{BIG}", f"NaN, {BIG}", "[" * 1000 + f"{BIG}" + "]" * 1000]
)
def test_what_cannot_be_read(text: str) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        loads(text.encode())


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_digits_are_kept(link: ForeignLink, tmp_path: Path, suffix: str) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"id": BIG}, {"id": 5}, {"id": 2**64 + 1}])
    target = tmp_path / f"out{suffix}"
    spec = BatchSpec(
        input_path=str(source),
        output_path=str(target),
        output_format="columns",
        prompt_template="[[say {id}]]",
    )
    assert run(spec, link, tmp_path).manifest.outcomes == {"ok": 3}
    if suffix == ".parquet":
        rows = parquet.read_table(target).to_pylist()
    elif suffix == ".csv":
        with target.open(newline="") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = read_rows(target)
    wanted = [str(BIG), "5", str(2**64 + 1)]
    assert [str(row["id"]) for row in rows] == wanted
    assert [row["response"] for row in rows] == wanted


def test_a_parameter_that_no_request_can_say_is_a_bad_record(
    link: ForeignLink, tmp_path: Path
) -> None:
    rows = [
        batch_row("a", "a", seed=BIG),
        {"prompt": "b", "params": {"seed": BIG}},
        {"prompt": "c", "params": json.dumps({"seed": BIG})},
        {"prompt": "d", "params": {"seed": 5}},
    ]
    source = write_rows(tmp_path / "in.jsonl", rows)
    spec = BatchSpec(
        input_path=str(source), output_path=str(tmp_path / "out.jsonl"), max_error_rate=1
    )
    assert run(spec, link, tmp_path).manifest.outcomes == {"invalid_input": 3, "ok": 1}


def test_a_decimal_keeps_its_digits() -> None:
    assert parameter("seed", Decimal(BIG)) == BIG
    assert parameters({"seed": Decimal(2**63 + 1)}, True) == {"seed": 2**63 + 1}
