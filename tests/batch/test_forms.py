"""Bad rows in every form of input that can hold them: one error row with file and line, the others answered."""

from __future__ import annotations

import csv
import gzip
import io
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from airflow_provider_vllm.batch.spec import BatchSpec
from tests.batch.helpers import ForeignLink, read_rows, run
from tests.fakes.endpoint import ThreadedEndpoint

GOOD = 20
BEFORE = 4
USER = [{"role": "user", "content": "x"}]
REJECTED = "rejected"
CSV_HEADER = ["prompt", "temperature", "model", "messages", "params", "note"]


def csv_line(**cells: str) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([cells.get(name, "") for name in CSV_HEADER])
    return text.getvalue().encode()


def csv_file(bad: bytes) -> bytes:
    good = [csv_line(prompt=f"p{index}", note="a, b") for index in range(GOOD)]
    head = ",".join(CSV_HEADER).encode() + b"\n"
    return head + b"".join([*good[:BEFORE], bad, *good[BEFORE:]])


def text_file(bad: bytes) -> bytes:
    good = [b"p%d\n" % index for index in range(GOOD)]
    return b"".join([*good[:BEFORE], bad, *good[BEFORE:]])


def parquet_file(bad: dict[str, Any]) -> bytes:
    rows: list[dict[str, Any]] = [{"prompt": f"p{index}"} for index in range(GOOD)]
    rows.insert(BEFORE, bad)
    message = pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string()})
    schema = pyarrow.schema(
        {
            "prompt": pyarrow.string(),
            "temperature": pyarrow.float64(),
            "model": pyarrow.string(),
            "messages": pyarrow.list_(message),
        }
    )
    columns = {
        name: pyarrow.array([row.get(name) for row in rows], schema.field(name).type)
        for name in schema.names
        if name != "prompt"
    }
    texts = pyarrow.array([_bytes(row.get("prompt")) for row in rows], pyarrow.binary())
    columns["prompt"] = texts.view(pyarrow.string())  # which need not be UTF-8
    out = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


def _bytes(prompt: Any) -> bytes | None:
    return prompt.encode() if isinstance(prompt, str) else prompt


# form, what, the file, code or outcome, line where it is not the usual one
CASES: list[tuple[str, str, bytes, str]] = [
    ("txt", "empty line", text_file(b"\n"), "empty_row"),
    ("txt", "invalid UTF-8", text_file(b"caf\xe9\n"), "invalid_utf8"),
    ("txt", "huge line", text_file(b"x" * 10_000_000 + b"\n"), "row_too_long"),
    ("txt", "too long for the model", text_file(b"word " * 200 + b"\n"), REJECTED),
    ("csv", "short row", csv_file(b"bad\n"), "ragged_row"),
    ("csv", "long row", csv_file(b"bad,,,,,,,\n"), "ragged_row"),
    ("csv", "invalid UTF-8", csv_file(csv_line(note="x").replace(b"x", b"\xff")), "invalid_utf8"),
    ("csv", "unclosed quote", csv_file(b'"bad,,,,,\n'), "invalid_csv"),
    ("csv", "unclosed last quote", csv_file(b'bad,,,,,"\n'), "invalid_csv"),
    ("csv", "text after a quote", csv_file(b'"a"bad,,,,,\n'), "invalid_csv"),
    ("csv", "quotes escaped by backslashes", csv_file(rb'"a \"b\" c",,,,,' + b"\n"), "invalid_csv"),
    ("csv", "huge field", csv_file(csv_line(prompt="x" * 10_000_000)), "row_too_long"),
    ("csv", "huge row", csv_file(csv_line(note=("x" * 999 + "\n") * 20_000)), "row_too_long"),
    ("csv", "empty prompt", csv_file(csv_line(note="x")), "invalid_prompt"),
    ("csv", "unknown role", csv_file(csv_line(messages='[{"role": "alien"}]')), "invalid_messages"),
    ("csv", "stream", csv_file(csv_line(prompt="x", params='{"stream": true}')), "stream"),
    ("csv", "infinite", csv_file(csv_line(prompt="x", temperature="inf")), "invalid_value"),
    ("csv", "negative temperature", csv_file(csv_line(prompt="x", temperature="-1")), REJECTED),
    ("csv", "unknown model", csv_file(csv_line(prompt="x", model="nobody")), REJECTED),
    ("parquet", "null", parquet_file({}), "null_prompt"),
    ("parquet", "empty prompt", parquet_file({"prompt": ""}), "invalid_prompt"),
    ("parquet", "invalid UTF-8", parquet_file({"prompt": b"caf\xe9"}), "invalid_utf8"),
    ("parquet", "huge cell", parquet_file({"prompt": "x" * 10_000_000}), "row_too_long"),
    ("parquet", "empty messages", parquet_file({"messages": []}), "invalid_messages"),
    ("parquet", "no role", parquet_file({"messages": [{"content": "x"}]}), "invalid_messages"),
    ("parquet", "negative", parquet_file({"prompt": "x", "temperature": -1.0}), REJECTED),
    ("parquet", "unknown model", parquet_file({"prompt": "x", "model": "nobody"}), REJECTED),
    ("parquet", "too long for the model", parquet_file({"prompt": "word " * 200}), REJECTED),
]


@pytest.mark.parametrize("gz", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize(
    ("form", "data", "code"),
    [(form, data, code) for form, _, data, code in CASES],
    ids=[f"{form}: {what}" for form, what, _, _ in CASES],
)
def test_one_error_row(
    server: ThreadedEndpoint,
    link: ForeignLink,
    tmp_path: Path,
    form: str,
    data: bytes,
    code: str,
    gz: bool,
) -> None:
    server.behaviour.max_words = 100
    source = tmp_path / (f"in.{form}.gz" if gz else f"in.{form}")
    source.write_bytes(gzip.compress(data, 1) if gz else data)
    table = form != "txt"
    spec = BatchSpec(
        input_path=str(source),
        output_path=str(tmp_path / ("out.csv" if table else "out.jsonl")),
        param_columns=["temperature", "model"],
    )
    result = run(spec, link, tmp_path)
    outcome = REJECTED if code == REJECTED else "invalid_input"
    assert result.manifest.outcomes == {"ok": GOOD, outcome: 1}
    (row,) = read_rows(Path(str(result.manifest.errors_path)))
    line = BEFORE + 1 + (form == "csv")
    error = row["error"]
    assert (error["file"], error["line"]) == (str(source), line)
    if code == REJECTED:
        assert row["custom_id"] == f"row-{BEFORE + 1}"
    else:
        assert error["code"] == code
        unit = "row" if form == "parquet" else "line"
        assert error["message"].startswith(f"{source}, {unit} {line}: ")
    if table:
        with (tmp_path / "out.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [bool(row["error"]) for row in rows] == [i == BEFORE for i in range(GOOD + 1)]
        assert [row["response"].rpartition("user: ")[2] for row in rows if row["response"]] == [
            f"p{index}" for index in range(GOOD)
        ]


def test_messages_and_parameters_in_csv(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    """CSV knows text only: JSON in it is read, and a cell without a value is no parameter."""
    lines = [
        csv_line(messages='[{"role": "system", "content": "s"}, {"role": "user", "content": "m"}]'),
        csv_line(prompt="[not JSON", temperature="nan", params='{"seed": 7, "stop": "5"}'),
        csv_line(prompt="p", temperature="0.5", params="no object"),
    ]
    (tmp_path / "in.csv").write_bytes(",".join(CSV_HEADER).encode() + b"\n" + b"".join(lines))
    spec = BatchSpec(
        input_path=str(tmp_path / "in.csv"),
        output_path=str(tmp_path / "out.csv"),
        param_columns=["temperature"],
        params={"temperature": 1, "max_tokens": 4},
        pack=1,
        concurrency=1,
    )
    assert run(spec, link, tmp_path).manifest.outcomes == {"ok": 3}
    first, second, third = server.behaviour.bodies
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert second == {
        "model": "tiny", "messages": [{"role": "user", "content": "[not JSON"}],
        "temperature": 1, "max_tokens": 4, "seed": 7, "stop": "5",
    }  # fmt: skip
    assert third["temperature"] == 0.5


def test_parameters_of_a_list_that_no_json_has(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    values: list[Any] = [float("nan"), Decimal("0.5"), None, float("inf")]
    rows = [{"prompt": "a", "params": {"temperature": value}} for value in values]
    spec = BatchSpec(
        prompts=rows, params={"temperature": 1}, pack=1, concurrency=1, max_error_rate=1
    )
    result = run(spec, link, tmp_path)
    assert [body["temperature"] for body in server.behaviour.bodies] == [1, 0.5, None]
    assert result.errors is not None
    assert [error["message"] for error in result.errors] == ["prompts, row 4: temperature is inf"]


def test_a_row_may_have_its_own_kind_of_prompt(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    """Parquet has every column in every row, and every field in every message."""
    table = pyarrow.table(
        {
            "prompt": ["p", None],
            "messages": [None, [{"role": "user", "content": "m", "tool_calls": None}]],
            "params": [{"seed": 7, "top_p": None}, {"seed": None, "top_p": 0.5}],
        }
    )
    parquet.write_table(table, tmp_path / "in.parquet")
    spec = BatchSpec(
        input_path=str(tmp_path / "in.parquet"),
        output_path=str(tmp_path / "out.parquet"),
        params={"seed": 1},
        pack=1,
        concurrency=1,
    )
    assert run(spec, link, tmp_path).manifest.outcomes == {"ok": 2}
    first, second = server.behaviour.bodies
    assert (first["seed"], "top_p" in first) == (7, False)
    assert (second["seed"], second["top_p"]) == (1, 0.5)
    assert second["messages"] == [{"role": "user", "content": "m"}]
    kept = parquet.read_table(tmp_path / "out.parquet").select(table.column_names)
    assert kept.schema == table.schema
    assert kept.to_pylist() == table.to_pylist()


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
@pytest.mark.parametrize("gz", [False, True])
def test_gzip_is_known_by_its_content(
    link: ForeignLink, tmp_path: Path, name: str, gz: bool
) -> None:
    data = b'{"prompt": "a"}\n{"prompt": "b"}\n'
    (tmp_path / name).write_bytes(gzip.compress(data) if gz else data)
    spec = BatchSpec(input_path=str(tmp_path / name), output_path=str(tmp_path / "out.jsonl"))
    assert run(spec, link, tmp_path).manifest.outcomes == {"ok": 2}


def test_the_log_names_file_and_line(link: ForeignLink, tmp_path: Path) -> None:
    from airflow_provider_vllm.exceptions import BatchFailed

    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{broken\n')
    spec = BatchSpec(input_path=str(tmp_path / "in.jsonl"), output_path=str(tmp_path / "out.jsonl"))
    with pytest.raises(BatchFailed, match=r"row-2: \S+in\.jsonl, line 2: not JSON"):
        run(spec, link, tmp_path)


def test_an_extra_role(link: ForeignLink, tmp_path: Path) -> None:
    prompts = [[{"role": "tool", "content": "x"}], [{"role": "critic", "content": "x"}], USER]
    spec = BatchSpec(prompts=prompts, max_error_rate=1)
    result = run(spec, link, tmp_path)
    assert result.errors is not None
    assert "name it in extra_roles" in result.errors[0]["message"]
    assert result.manifest.outcomes == {"invalid_input": 1, "ok": 2}
    other = run(spec.replace(extra_roles=["critic"]), link, tmp_path)
    assert other.manifest.outcomes == {"ok": 2, "rejected": 1}  # the server has the last word
