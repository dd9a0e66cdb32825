"""CSV by RFC 4180: what breaks it is one record of one line, however long the rest is."""

from __future__ import annotations

import csv
import io
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.batch.csv_rows import CsvRows
from airflow_provider_vllm.batch.run import check_inputs
from airflow_provider_vllm.batch.shards import merge, split
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import InvalidPrompts
from tests.batch.helpers import ForeignLink, read_rows, run

Read = list[tuple[int, list[str], "tuple[str, str] | None"]]


def parse(data: bytes, held: int = 1 << 24) -> Read:
    text = io.TextIOWrapper(
        io.BytesIO(data), encoding="utf-8-sig", errors="surrogateescape", newline=""
    )
    return list(CsvRows(text, held))


def lines(found: Read) -> list[tuple[int, str | None]]:
    return [(line, None if wrong is None else wrong[0]) for line, _, wrong in found]


LONG = b"x" * 3000
BAD, LONGER = "invalid_csv", "row_too_long"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'1,"a\n2,b\n3,c\n', [(1, BAD), (2, None), (3, None)]),
        (b'1,"a\n2,b\n3,"c"\n4,d\n', [(1, BAD), (2, None), (3, None), (4, None)]),
        (b'1,"a\r\n2,b\r\n', [(1, BAD), (2, None)]),
        (b'1,"a"b\n2,b\n', [(1, BAD), (2, None)]),
        (b'1,"two\nlines"\n\n2,b', [(1, None), (4, None)]),
        (b'1,5" pipe\n2,say "so"\n', [(1, None), (2, None)]),
        (b"a\rb\r", [(1, None), (2, None)]),
        (b"\xef\xbb\xbf1,a\n", [(1, None)]),
        (b"\n\n", []),
        (b"1," + LONG + b"\n2,b\n", [(1, LONGER), (2, None)]),
        (b'1,"' + LONG + b'\n2,b\n3,"c"\n', [(1, BAD), (2, None), (3, None)]),
        (b'1,"' + b"x,y\n" * 900 + b'",z\n2,b\n', [(1, LONGER), (902, None)]),
        (b'1,"a\n2,"' + LONG + b'"\n3,c\n', [(1, BAD), (2, LONGER), (3, None)]),
        (b'1,"a\n' + b"2,b\n" * 900 + b'"\n3,c\n', [(1, LONGER), (903, None)]),
    ],
)
def test_each_record_and_its_line(data: bytes, expected: list[Any]) -> None:
    assert lines(parse(data, 1024)) == expected


def test_random_text_is_read_as_csv_reads_it_strictly() -> None:
    """Where csv finds an error, so does this; held back or not makes no difference to where records begin."""
    dice, errors = random.Random(5), 0
    for _ in range(5000):
        text = "".join(dice.choice('a,"\n"é') for _ in range(dice.randint(0, 30)))
        found = parse(text.encode())
        try:
            strict = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]
            assert [cells for _, cells, _ in found] == strict
        except csv.Error:
            errors += 1
            assert any(wrong for _, _, wrong in found)
        short = [
            (line, None if code == LONGER else code)
            for line, code in lines(parse(text.encode(), 3))
        ]
        assert short == lines(found)
    assert 1000 < errors < 4500


def test_an_unclosed_quote_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    with path.open("wb") as file:
        file.write(b'n,prompt\n0,"open\n')
        for _ in range(100):
            file.write((b"1," + b"x" * 1021 + b"\n") * (1 << 10))
    tracemalloc.start()
    with path.open(encoding="utf-8", newline="") as text:
        read = iter(CsvRows(text))
        first = [next(read) for _ in range(3)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lines(first) == [(1, None), (2, BAD), (3, None)]
    assert peak < 64 << 20


def test_an_unclosed_quote_in_a_batch(link: ForeignLink, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text('n,prompt\n1,a\n2,"open\n3,c\n4,"d"\n')
    spec = BatchSpec(
        input_path=str(tmp_path / "in.csv"),
        output_path=str(tmp_path / "out.csv"),
        max_error_rate=1,
    )
    result = run(spec, link, tmp_path)
    assert result.manifest.outcomes == {"invalid_input": 1, "ok": 3}
    (error,) = read_rows(Path(str(result.manifest.errors_path)))
    assert error["error"]["line"] == 3
    assert "the quote that opens field 2 is not closed" in error["error"]["message"]
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["n"], bool(row["response"])) for row in rows] == [
        ("1", True), ("2", False), ("3", True), ("4", True),
    ]  # fmt: skip


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_broken_records_are_broken_in_their_shards(
    link: ForeignLink, tmp_path: Path, shards: int
) -> None:
    text = 'n,prompt\n1,a\n2,"open\n3,"c, c"\n4,"d\nd"\n5,e,e\n6,"f"f\n7,", g"\n'
    (tmp_path / "in.csv").write_text(text)
    manifests = []
    for index, part in enumerate(split(str(tmp_path / "in.csv"), str(tmp_path), shards=shards)):
        output = str(tmp_path / f"out-{index}.csv")
        spec = BatchSpec(**part, output_path=output, max_error_rate=1)
        manifests.append(run(spec, link, tmp_path / str(index)).manifest.to_json())
    whole = merge(manifests, str(tmp_path / "merged.csv"))
    assert whole["outcomes"] == {"invalid_input": 3, "ok": 4}
    with (tmp_path / "merged.csv").open(newline="") as file:
        rows = [(row["n"], bool(row["response"])) for row in csv.DictReader(file)]
    assert rows == [(str(n), n in (1, 3, 4, 7)) for n in range(1, 8)]


def test_no_row_makes_no_shard(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("prompt\n\n")
    with pytest.raises(InvalidPrompts, match=r"in\.csv holds no rows"):
        split(str(tmp_path / "in.csv"), str(tmp_path), shards=2)


@pytest.mark.parametrize(
    "text", ["a\rb", "a\r\nb", '"', '"a', " a ", "a,b", "\u2028", "\ufeffa", "a\0b"]
)
def test_any_text_is_found_again(link: ForeignLink, tmp_path: Path, text: str) -> None:
    target = tmp_path / "out.csv"
    rows = [{"note": text, "prompt": f"[[say {text}]]"}, {"note": "z", "prompt": text}]
    manifest = run(BatchSpec(prompts=rows, output_path=str(target)), link, tmp_path).manifest
    merge([manifest.to_json()], str(tmp_path / "merged.csv"))
    for path in (target, tmp_path / "merged.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            found = list(csv.DictReader(file))
        assert [row["note"] for row in found] == [text, "z"]
        assert found[0]["response"] == text
    again = BatchSpec(
        input_path=str(target), output_path=str(tmp_path / "o.jsonl"), prompt_column="note"
    )
    assert check_inputs(again).extent.rows == 2


def test_a_header_after_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("\n\nprompt\na\n")
    spec = BatchSpec(input_path=str(tmp_path / "in.csv"), output_path=str(tmp_path / "o.csv"))
    assert check_inputs(spec).extent.rows == 1
