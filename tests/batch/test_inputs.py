"""Input formats: what each becomes, as a stream, of one file."""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.batch.extent import measure
from airflow_provider_vllm.batch.row import BadRow, Row
from airflow_provider_vllm.batch.rows import RowMaker
from airflow_provider_vllm.batch.source import RecordError
from airflow_provider_vllm.batch.sources import find_sources, local_path, records
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.batch.template import RowError, Template
from tests.batch.helpers import ForeignLink, batch_row, prompts_of, read_rows, run, write_rows

THREE = b'{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n'


def spec(*paths: Any, **more: Any) -> BatchSpec:
    return BatchSpec(input_path=[str(path) for path in paths], output_path="out.jsonl", **more)


def test_jsonl_text_csv_and_parquet_say_the_same(tmp_path: Path) -> None:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    (tmp_path / "a.jsonl").write_bytes(THREE)
    (tmp_path / "b.txt").write_text("a\nb\nc\n")
    (tmp_path / "c.csv").write_text("label,prompt\n1,a\n2,b\n3,c\n")
    parquet.write_table(pyarrow.table({"prompt": ["a", "b", "c"]}), tmp_path / "d.parquet")
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(THREE))
    (tmp_path / "f.csv.gz").write_bytes(gzip.compress(b"prompt\na\nb\nc\n"))
    for path in sorted(tmp_path.iterdir()):
        assert prompts_of(spec(path)) == ["a", "b", "c"], path.name


def test_csv_with_quotes_and_newlines(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('\ufeffprompt,label\n"two\nlines, one ""quoted""",x\nplain,y\n', newline="")
    assert prompts_of(spec(path)) == ['two\nlines, one "quoted"', "plain"]


def test_templates_and_prompt_columns(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("title,body\nA,alpha\nB,beta\n")
    filled = prompts_of(spec(path, prompt_template="{{{title}}}: {body:>6}"))
    assert filled == ["{A}:  alpha", "{B}:   beta"]
    assert prompts_of(spec(path, prompt_column="body")) == ["alpha", "beta"]


def test_a_template_is_filled_with_text_prompts_too(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a\n")
    (tmp_path / "in.jsonl").write_text('"b"\n')
    paths = (tmp_path / "in.txt", tmp_path / "in.jsonl")
    assert prompts_of(spec(*paths, prompt_template="Say {prompt}!")) == ["Say a!", "Say b!"]
    assert prompts_of(BatchSpec(prompts=["c"], prompt_template="Say {prompt}!")) == ["Say c!"]


def test_a_column_named_body_makes_no_batch_row(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("custom_id,method,url,body,prompt\n1,POST,u,text,a\n")
    write_rows(
        tmp_path / "in.jsonl",
        [{"url": "http://x", "body": "text", "prompt": "b"}, {"custom_id": "2", "body": "text", "prompt": "c"},
         {"method": "x", "body": {"k": 1}, "prompt": "d"}, {"custom_id": "3", "body": batch_row("", "e")["body"]}],
    )  # fmt: skip
    assert prompts_of(spec(tmp_path / "in.csv", tmp_path / "in.jsonl")) == ["a", "b", "c", "d", "e"]
    filled = prompts_of(spec(tmp_path / "in.csv", prompt_template="{body}"))
    assert filled == ["text"]


def test_numpy_values_are_sent_as_numbers() -> None:
    import numpy
    import orjson

    rows = [
        numpy.str_("a"),
        {"prompt": "b", "params": {"top_p": numpy.float32(0.5)}},
        {"prompt": numpy.array([1, 2])},
    ]
    one = BatchSpec(prompts=rows, endpoint="completions", params={"max_tokens": numpy.int64(5)})
    made = list(RowMaker(one, "m", pack=True).rows(records(one, ())))
    bodies = [orjson.loads(row.body) for row in made if isinstance(row, Row)]
    assert [body["prompt"] for body in bodies] == ["a", "b", [1, 2]]
    assert (bodies[1]["max_tokens"], bodies[1]["top_p"]) == (5, 0.5)


def test_the_number_of_a_row_and_a_custom_id_never_meet() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    for name in ("0", "#0"):
        named = {"custom_id": name, "body": body}
        one = [BatchSpec(prompts=rows) for rows in (["a"], [named])]
        keys = [next(RowMaker(each, "m").rows(records(each, ()))).key for each in one]
        assert keys[0] != keys[1]


def test_default_ids_are_unique_beside_custom_ids() -> None:
    rows = ["a", batch_row("row-1", "b"), batch_row("row-4", "c"), "d", batch_row("row-01", "e")]
    made = list(RowMaker(BatchSpec(prompts=rows), "m").rows(records(BatchSpec(prompts=rows), ())))
    assert [row.custom_id for row in made] == ["row-1", "row-1", "row-4", "row-4'", "row-01"]
    assert [getattr(row, "code", "") for row in made] == ["", "duplicate_custom_id", "", "", ""]
    plain = ["a", {"prompt": "b", "custom_id": "row-1"}, {"prompt": "c", "custom_id": "row-4"}, "d"]
    made = list(RowMaker(BatchSpec(prompts=plain), "m").rows(records(BatchSpec(prompts=plain), ())))
    assert [row.custom_id for row in made if isinstance(row, Row)] == ["row-1", "row-4", "row-4'"]
    named = [b"broken", batch_row("row-1", "b")]
    good = list(RowMaker(BatchSpec(prompts=named), "m").rows(records(BatchSpec(prompts=named), ())))
    assert [type(row) for row in good] == [BadRow, Row]


class Mapped(Sequence[Any]):
    """As a mapped task hands its outputs on: fetched one by one, with an address for a repr."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]


def test_a_list_is_known_again_by_what_is_in_it() -> None:
    def digest(prompts: Any) -> str:
        return measure(BatchSpec(prompts=prompts), ()).digest

    odd = ["\ud800", {1: 2, "a": {3}}, 1 << 70, float("nan"), ("a",)]
    assert digest(Mapped(["a", "b"])) == digest(["a", "b"]) != digest(["b", "a"])
    assert digest([*odd, object()]) == digest([*odd, object()]) != digest([*odd[1:], object(), "a"])
    assert digest([{"a": 1, "b": 2}]) == digest([{"b": 2, "a": 1}]) != digest([{"a": 1, "b": 3}])
    assert digest(["a", "b"]) != digest(['a"\n"b'])


def test_values_of_any_type_are_no_crash(link: ForeignLink, tmp_path: Path) -> None:
    deep: list[Any] = []
    deep.append(deep)
    prompts = ["a", {1: 2, "a": {3}}, {(1, 2): 3}, {"prompt": "b", "x": deep}, b"bytes", {"a", "b"}]
    result = run(BatchSpec(prompts=prompts, max_error_rate=1), link, tmp_path)
    assert result.manifest.outcomes == {"invalid_input": 4, "ok": 2}


def test_an_array_anywhere_in_a_row_is_no_crash() -> None:
    import numpy

    array = numpy.array([1, 2])
    row = batch_row("a", "b")
    rows = [
        *({**row, name: array} for name in ("custom_id", "method", "url", "body")),
        {**row, "body": {**row["body"], "stream": array}},
        {"prompt": "a", "params": {"stream": array}},
        {"prompt": "a", "custom_id": array},
    ]
    one = BatchSpec(prompts=rows)
    made = list(RowMaker(one, "m").rows(records(one, ())))
    assert [type(row) for row in made] == [BadRow] * 6 + [Row]


def test_rows_of_columns_keep_their_custom_id(link: ForeignLink, tmp_path: Path) -> None:
    """A later row with the same one is a bad record; what is no name is none."""
    write_rows(
        tmp_path / "in.jsonl",
        [{"custom_id": "mine", "prompt": "a"}, {"custom_id": 7, "prompt": "b"}, {"prompt": "c"},
         {"custom_id": "mine", "prompt": "d"}, {"custom_id": "", "prompt": "e"},
         {"custom_id": "bad", "prompt": None}],
    )  # fmt: skip
    one = BatchSpec(
        input_path=str(tmp_path / "in.jsonl"),
        output_path=str(tmp_path / "out.jsonl"),
        max_error_rate=1,
    )
    result = run(one, link, tmp_path)
    names = [row["custom_id"] for row in read_rows(tmp_path / "out.jsonl")]
    assert names == ["mine", "7", "row-3", "row-5"]
    errors = read_rows(Path(str(result.manifest.errors_path)))
    found = [(row["custom_id"], row["error"]["code"]) for row in errors]
    assert found == [("mine", "duplicate_custom_id"), ("bad", "null_prompt")]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_the_custom_id_of_a_bad_row_is_used(tmp_path: Path, kind: str) -> None:
    """Two lines of one name, one in the results and one in the errors, would be two answers to one question."""
    path = tmp_path / f"in.{kind}"
    if kind == "csv":
        path.write_text("custom_id,prompt\na,\na,x\nb,y\n")
    else:
        write_rows(
            path, [batch_row("a", "x", stream=True), batch_row("a", "x"), batch_row("b", "y")]
        )
    made = list(
        RowMaker(spec(path), "m").rows(records(spec(path), find_sources(spec(path), local_path)))
    )
    assert [row.custom_id for row in made] == ["a", "a", "b"]
    assert [isinstance(row, BadRow) for row in made] == [True, True, False]
    assert isinstance(made[1], BadRow) and made[1].code == "duplicate_custom_id"


@pytest.mark.parametrize("endpoint", ["embeddings", "classify", "pooling"])
def test_messages_for_an_endpoint_without_answers(endpoint: str) -> None:
    import orjson

    messages = [{"role": "user", "content": "a"}]
    url = BatchSpec(prompts=["a"], endpoint=endpoint).endpoint
    rows = [
        {"messages": messages},
        messages,
        {"custom_id": "x", "url": url, "body": {"messages": messages}},
    ]
    one = BatchSpec(prompts=rows, endpoint=endpoint)
    made = list(RowMaker(one, "m", pack=True).rows(records(one, ())))
    bodies = [orjson.loads(row.body) for row in made if isinstance(row, Row)]
    assert bodies == [{"model": "m", "messages": messages}] * 3
    assert [row.params for row in made if isinstance(row, Row)] == [None] * 3  # never packed


def test_a_template_meets_a_row_without_the_column(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [{"a": 1}, {"b": 2}, {"a": None}])
    rows = RowMaker(spec(path, prompt_template="{a}"), "m").rows(
        records(spec(path), find_sources(spec(path), local_path))
    )
    assert [getattr(row, "code", "") for row in rows] == ["", "missing_column", "null_prompt"]


def test_parameters_in_columns(tmp_path: Path) -> None:
    import orjson

    path = tmp_path / "in.csv"
    path.write_text("prompt,temperature,max_tokens\na,0.5,8\nb,,\n")
    one = spec(path, param_columns=["temperature", "max_tokens"], params={"max_tokens": 99})
    rows = list(RowMaker(one, "m").rows(records(one, find_sources(one, local_path))))
    bodies = [orjson.loads(row.body) for row in rows if isinstance(row, Row)]
    assert (bodies[0]["temperature"], bodies[0]["max_tokens"]) == (0.5, 8)
    assert "temperature" not in bodies[1] and bodies[1]["max_tokens"] == 99


def test_keys_follow_what_is_sent_and_nothing_else() -> None:
    def keys(rows: list[Any], **more: Any) -> list[bytes]:
        made = RowMaker(BatchSpec(prompts=rows, **more), "m").rows(
            records(BatchSpec(prompts=rows, **more), ())
        )
        return [row.key for row in made if isinstance(row, Row)]

    plain = [{"prompt": "a"}, {"prompt": "a"}]
    first, second = keys(plain)
    assert first != second  # two samples of one prompt are two rows
    assert keys([{"prompt": "a", "label": 5}, {"prompt": "a"}]) == [first, second]
    assert keys(plain, params={"temperature": 1}) != [first, second]
    assert keys(plain, model="other") != [first, second]
    named = keys([batch_row("x", "a"), batch_row("y", "a")])
    assert keys([batch_row("y", "a"), batch_row("x", "a")]) == named[::-1]


def test_a_shard_numbers_its_rows_as_the_whole_does() -> None:
    whole = BatchSpec(prompts=["a", "b", "c"])
    shard = BatchSpec(prompts=["c"], row_offset=2)
    rows = [list(RowMaker(one, "m").rows(records(one, ()))) for one in (whole, shard)]
    assert rows[0][2].custom_id == rows[1][0].custom_id == "row-3"
    assert rows[0][2].key == rows[1][0].key


def test_a_long_line_is_never_held(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        file.write(b'{"prompt": "a"}\n{"prompt": "')
        for _ in range(64):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n{"prompt": "b"}\n')
    one = spec(path, max_row_bytes=4096)
    tracemalloc.start()
    rows = list(RowMaker(one, "m").rows(records(one, find_sources(one, local_path))))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [type(row) for row in rows] == [Row, BadRow, Row]
    assert peak < 4 << 20


@pytest.mark.parametrize("format", ["jsonl", "text"])
def test_the_format_may_be_named(tmp_path: Path, format: str) -> None:
    path = tmp_path / "no-suffix"
    path.write_text('"a"\n')
    assert prompts_of(spec(path, input_format=format)) == ["a" if format == "jsonl" else '"a"']


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("size", [1023, 1024, 1025, 1026, 1027, 1028, 1029, 1030, 5000])
def test_a_first_line_of_any_length_is_one_record(
    tmp_path: Path, mark: bytes, end: bytes, size: int
) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(mark + b"x" * size + (end and b"\nlast\n"))
    one = spec(path, max_row_bytes=1024)
    first, *others = records(one, find_sources(one, local_path))
    assert (first[1], isinstance(first[2], RecordError)) == (1, size > 1025)
    assert [(line, value) for _, line, value in others] == ([(2, "last")] if end else [])


def test_a_line_of_text_keeps_its_blanks(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"    return x \r\n\tb\t\n \nc\n  \n")
    assert prompts_of(spec(tmp_path / "a.txt")) == ["    return x ", "\tb\t", "c"]


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("empty", [{"prompt": ""}, {"messages": []}, {"prompt": None}])
def test_the_first_column_that_is_not_empty_is_sent(
    tmp_path: Path, table: bool, empty: dict[str, Any]
) -> None:
    import pyarrow
    from pyarrow import parquet

    row = {**empty, "text": "hello"}
    if table:
        parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
        assert prompts_of(spec(tmp_path / "a.parquet")) == ["hello"]
    else:
        assert prompts_of(spec(write_rows(tmp_path / "a.jsonl", [row]))) == ["hello"]


@pytest.mark.parametrize(
    ("row", "code", "field"),
    [
        ({"prompt": "", "text": ""}, "invalid_prompt", "prompt"),
        ({"messages": []}, "invalid_messages", "messages"),
        ({"prompt": None, "text": None}, "null_prompt", "prompt"),
        ({"prompt": None, "text": ""}, "invalid_prompt", "text"),
        ({"text": "a", "prompt": "", "params": "{'seed': 1}"}, "invalid_json", "params"),
    ],
)
def test_a_row_whose_columns_are_all_empty(row: Any, code: str, field: str) -> None:
    (made,) = RowMaker(BatchSpec(prompts=[row]), "m").make([("prompts", 1, row)])
    assert isinstance(made, BadRow)
    assert (made.code, made.field) == (code, field)


def test_the_index_that_pandas_writes_is_a_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(",text\n0,a\n1,b\n")
    assert prompts_of(spec(tmp_path / "a.csv")) == ["a", "b"]


def test_an_empty_cell_is_no_text_to_compare(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text_1,text_2\na,b\n,b\na,\n,\n")
    one = spec(tmp_path / "a.csv", endpoint="score")
    made = list(RowMaker(one, "m").rows(records(one, find_sources(one, local_path))))
    assert [isinstance(row, Row) for row in made] == [True, False, False, False]


@pytest.mark.parametrize(
    ("custom_id", "name"), [(1.0, "1"), (Decimal("5"), "5"), (1.5, "row-1"), (math.nan, "row-1"), (math.inf, "row-1")]
)  # fmt: skip
def test_a_number_as_custom_id(custom_id: Any, name: str) -> None:
    """A column of integers with a null in it comes as floats."""
    row = {"custom_id": custom_id, "prompt": "a"}
    (made,) = RowMaker(BatchSpec(prompts=[row]), "m").make([("prompts", 1, row)])
    assert made.custom_id == name


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_json_has_not_is_told_of(word: str) -> None:
    """As json.dumps writes a missing one."""
    line = f'{{"prompt": "é", "x": {word}}}'.encode()
    (made,) = RowMaker(BatchSpec(prompts=["a"]), "m").make([("in.jsonl", 1, line)])
    assert isinstance(made, BadRow)
    assert made.message.endswith("NaN and Infinity are no JSON, write null")


def test_the_column_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"prompt,n\na,caf\xe9\n")
    one = spec(tmp_path / "a.csv")
    (made,) = RowMaker(one, "m").rows(records(one, find_sources(one, local_path)))
    assert isinstance(made, BadRow)
    assert (made.code, made.field) == ("invalid_utf8", "n")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"caf\xc3\xa9", "café"),
        ({"n": 10**25}, '{"n": 10000000000000000000000000}'),
        ({"cost": Decimal("1.50")}, '{"cost":"1.50"}'),
        ([b"a"], '["a"]'),
    ],
)
def test_a_template_writes_any_value(value: Any, text: str) -> None:
    assert Template("{t}").fill({"t": value}) == text


def test_a_template_takes_no_bytes_that_are_no_text() -> None:
    with pytest.raises(RowError, match="column t is not UTF-8"):
        Template("{t}").fill({"t": b"\xff"})
