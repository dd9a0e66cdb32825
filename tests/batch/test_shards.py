"""Split, run each shard, merge: the same as the whole."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from airflow_provider_vllm.batch.shards import merge, split
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import InvalidInput, InvalidPrompts
from tests.batch.helpers import ForeignLink, batch_row, read_rows, run, write_rows


def run_shards(
    link: ForeignLink, folder: Path, source: Path, shards: int, suffix: str
) -> list[dict[str, Any]]:
    manifests = []
    for index, arguments in enumerate(split(str(source), str(folder / "work"), shards=shards)):
        target = folder / f"out-{index}{suffix}"
        spec = BatchSpec(**arguments, output_path=str(target), max_error_rate=1)
        manifests.append(run(spec, link, folder / str(index)).manifest.to_json())
    return manifests


def rows() -> list[Any]:
    made: list[Any] = [{"prompt": f"p{index}"} for index in range(50)]
    made[9] = b"{broken\n"
    made[10] = b"\n"
    made[25] = batch_row("own", "[[status 400]]")
    made[30] = b"  \n"
    return made


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 50, 80])
def test_shards_of_json_lines(link: ForeignLink, tmp_path: Path, shards: int) -> None:
    source = write_rows(tmp_path / "in.jsonl", rows())
    whole = BatchSpec(
        input_path=str(source), output_path=str(tmp_path / "whole.jsonl"), max_error_rate=1
    )
    expected = run(whole, link, tmp_path / "whole").manifest
    manifests = run_shards(link, tmp_path, source, shards, ".jsonl")
    assert len(manifests) == min(shards, len(manifests))
    merged = merge(manifests, str(tmp_path / "merged.jsonl"))
    assert merged["outcomes"] == expected.outcomes
    assert merged["rows"] == sum(merged["outcomes"].values()) == 50
    assert (tmp_path / "merged.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    ids = [
        [row["custom_id"] for row in read_rows(tmp_path / name)]
        for name in ("merged.jsonl.errors.jsonl", "whole.jsonl.errors.jsonl")
    ]
    assert ids[0] == ids[1]


def test_shards_are_nearly_equal(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(103)])
    made = split(str(source), str(tmp_path / "work"), shards=4)
    sizes = [len(read_rows(Path(shard["input_path"]))) for shard in made]
    assert sizes == [26, 26, 26, 25]
    assert [shard["row_offset"] for shard in made] == [0, 26, 52, 78]


def test_shards_of_csv(link: ForeignLink, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    with source.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "n"], *([f"p\n{i}", i] for i in range(20))])
    manifests = run_shards(link, tmp_path, source, 3, ".csv")
    merge(manifests, str(tmp_path / "merged.csv"))
    with (tmp_path / "merged.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["n"] for row in found] == [str(i) for i in range(20)]
    assert all(row["response"] for row in found)


@pytest.mark.parametrize("shards", [1, 3, 4])
def test_shards_of_parquet(link: ForeignLink, tmp_path: Path, shards: int) -> None:
    source = tmp_path / "in.parquet"
    prompts = [f"p{index}" for index in range(20)]
    parquet.write_table(pyarrow.table({"prompt": prompts}), source, row_group_size=6)
    manifests = run_shards(link, tmp_path, source, shards, ".parquet")
    assert len(manifests) == shards
    merge(manifests, str(tmp_path / "merged.parquet"))
    found = parquet.read_table(tmp_path / "merged.parquet").to_pylist()
    assert [row["prompt"] for row in found] == prompts
    assert all(row["response"] for row in found)


def test_what_cannot_be_split_or_merged(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    (tmp_path / "in.txt").write_text("a\n")
    with pytest.raises(InvalidInput, match="shards"):
        split(str(source), str(tmp_path), shards=0)
    with pytest.raises(InvalidPrompts, match="several formats"):
        split([str(source), str(tmp_path / "in.txt")], str(tmp_path), shards=2)
    with pytest.raises(InvalidInput, match="at least one"):
        merge([], str(tmp_path / "out.jsonl"))
    with pytest.raises(InvalidInput, match="did not succeed"):
        merge([{"output_path": None}], str(tmp_path / "out.jsonl"))
    with pytest.raises(InvalidInput, match=r"a\.jsonl is given twice"):
        merge([{"output_path": "a.jsonl"}] * 2, str(tmp_path / "out.jsonl"))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_shards_with_other_columns(link: ForeignLink, tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": "a", "n": 1}, {"n": "two", "more": "x", "prompt": "b"}]
    manifests = []
    for index, row in enumerate(rows):
        source = write_rows(tmp_path / f"in-{index}.jsonl", [row])
        spec = BatchSpec(input_path=str(source), output_path=str(tmp_path / f"out-{index}{suffix}"))
        manifests.append(run(spec, link, tmp_path / str(index)).manifest.to_json())
    target = tmp_path / f"merged{suffix}"
    merge(manifests, str(target))
    if suffix == ".parquet":
        found = parquet.read_table(target).to_pylist()
    else:
        with target.open(newline="") as file:
            found = list(csv.DictReader(file))
    assert [(row["prompt"], row["n"], row["more"] or "") for row in found] == [
        ("a", "1", ""),
        ("b", "two", "x"),
    ]
    assert [row["response"].split()[-1] for row in found] == ["a", "b"]


def test_merge_and_an_errors_file_that_is_there(link: ForeignLink, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    manifests = run_shards(link, tmp_path, source, 1, ".jsonl")
    errors = write_rows(tmp_path / "merged.jsonl.errors.jsonl", [{"precious": 1}])
    with pytest.raises(InvalidInput, match="no batch has written it"):
        merge(manifests, str(tmp_path / "merged.jsonl"))
    assert read_rows(errors) == [{"precious": 1}]
    write_rows(
        errors, [{"custom_id": "row-1", "response": None, "error": {"code": "x", "message": "y"}}]
    )
    merge(manifests, str(tmp_path / "merged.jsonl"))
    assert not errors.exists()


class Fetched(Sequence[dict[str, Any]]):
    """The outputs of a mapped task: each is asked of Airflow whenever it is looked at."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.items, self.looks = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return self.items[index]


def test_manifests_are_fetched_once(link: ForeignLink, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    manifests = Fetched(run_shards(link, tmp_path, source, 2, ".jsonl"))
    assert merge(manifests, str(tmp_path / "merged.jsonl"))["rows"] == 2
    assert manifests.looks == len(manifests) + 1  # the one after the last ends it


def test_parquet_files_with_other_columns_are_split(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"prompt": ["a"], "n": [1]}), tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"more": ["x"], "prompt": ["b"]}), tmp_path / "b.parquet")
    (shard,) = split(str(tmp_path / "?.parquet"), str(tmp_path / "work"), shards=1)
    assert parquet.read_table(shard["input_path"]).to_pylist() == [
        {"prompt": "a", "n": 1, "more": None},
        {"prompt": "b", "n": None, "more": "x"},
    ]


@pytest.mark.parametrize(("shards", "files"), [(1, [3]), (2, [2, 2]), (6, [1] * 6)])
def test_parquet_files_with_other_types_are_split(
    tmp_path: Path, shards: int, files: list[int]
) -> None:
    """A column of integers is one of floats in the part with a null, as pandas writes it."""
    numbers: tuple[list[Any], ...] = ([1, 2], [3.0, None], [5, 6])
    for name, values in zip("abc", numbers, strict=True):
        table = pyarrow.table({"prompt": [f"{name}{value}" for value in values], "n": values})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    made = split(str(tmp_path / "?.parquet"), str(tmp_path / "work"), shards=shards)
    paths = [
        [each["input_path"]] if isinstance(each["input_path"], str) else each["input_path"]
        for each in made
    ]
    assert [len(each) for each in paths] == files
    read = [parquet.read_table(path) for each in paths for path in each]
    assert [value for each in read for value in each.column("n").to_pylist()] == [
        1,
        2,
        3.0,
        None,
        5,
        6,
    ]
    assert [each["row_offset"] for each in made] == [6 // shards * index for index in range(shards)]


@pytest.mark.parametrize("pattern", ["*.jsonl", "**/*.jsonl"])
def test_a_glob_that_takes_in_the_shards(tmp_path: Path, pattern: str) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_rows(tmp_path / name, [{"prompt": name}])
    folder = tmp_path if pattern == "*.jsonl" else tmp_path / "work"
    before = sorted(tmp_path.rglob("*.jsonl"))
    for _ in range(2):
        with pytest.raises(InvalidPrompts, match="a folder that input_path does not cover"):
            split(str(tmp_path / pattern), str(folder), shards=2)
        assert sorted(tmp_path.rglob("*.json*")) == before
    apart = tmp_path.parent / f"{tmp_path.name}-apart"
    for _ in range(2):
        made = split(str(tmp_path / pattern), str(apart), shards=2)
        assert [len(read_rows(Path(shard["input_path"]))) for shard in made] == [1, 1]


def test_a_shard_never_takes_the_place_of_its_input(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "shard-0000.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(InvalidPrompts, match="it would be overwritten"):
        split(str(source), str(tmp_path / "link"), shards=2)
    assert len(read_rows(source)) == 2


def test_shards_take_the_place_of_no_others(tmp_path: Path) -> None:
    """Mapped batches of the other input may still read theirs: they would answer the wrong rows."""
    first = write_rows(tmp_path / "a.jsonl", [{"prompt": "a"}] * 4)
    other = write_rows(tmp_path / "b.jsonl", [{"prompt": "b"}] * 4)
    work = tmp_path / "work"
    made = split(str(first), str(work), shards=4)
    before = {path: path.read_bytes() for path in work.iterdir()}
    with pytest.raises(InvalidInput, match=r"work has the shards of another input \(.*a\.jsonl\)"):
        split(str(other), str(work), shards=2)
    assert {path: path.read_bytes() for path in work.iterdir()} == before
    assert split(str(first), str(work), shards=4) == made
    write_rows(first, [{"prompt": "new"}] * 2)
    assert len(split(str(first), str(work), shards=4)) == 2, (
        "the same path, written anew, is the same input"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [("shard-0003.csv", "mine"), ("shards.json", "mine"), ("shards.json", "[1]")],
)
def test_shards_take_the_place_of_no_files_of_a_user(tmp_path: Path, name: str, text: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"prompt": "a"}] * 4)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / name).write_text(text)
    with pytest.raises(InvalidInput, match=f"{name} exists and no split has written it"):
        split(str(source), str(tmp_path / "work"), shards=2)
    (found,) = (tmp_path / "work").iterdir()
    assert found.read_text() == text


@pytest.mark.parametrize("end", [b"", b"\n", b" \n\t\r\n", b"\x0c\n\n", b"\xc2\xa0"])
def test_a_blank_line_is_the_same_to_a_batch_and_to_its_shards(
    link: ForeignLink, tmp_path: Path, end: bytes
) -> None:
    source = tmp_path / "in.txt"
    source.write_bytes(b"one\n\x0c\n\x0b\ntwo\n \nthree\n" + end)
    spec = BatchSpec(
        input_path=str(source), output_path=str(tmp_path / "whole.jsonl"), max_error_rate=1
    )
    expected = run(spec, link, tmp_path / "whole").manifest
    manifests = run_shards(link, tmp_path, source, 3, ".jsonl")
    merged = merge(manifests, str(tmp_path / "merged.jsonl"))
    assert merged["outcomes"] == expected.outcomes
    assert (tmp_path / "merged.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("shards", [1, 2, 3, 6])
def test_a_quote_that_is_left_open_ends_with_its_file(
    link: ForeignLink, tmp_path: Path, shards: int
) -> None:
    texts = {"a": 'n,prompt\n0,ok\n1,"abc\n', "b": 'n,prompt\n2,"\nrest"\n3,fine\n',
             "c": "n,prompt\n4,x\n", "d": 'n,prompt\n5,"d'}  # fmt: skip
    for name, text in texts.items():
        (tmp_path / f"{name}.csv").write_text(text)
    manifests = []
    made = split(str(tmp_path / "?.csv"), str(tmp_path / "work"), shards=shards)
    for index, part in enumerate(made):
        spec = BatchSpec(**part, output_path=str(tmp_path / f"out-{index}.csv"), max_error_rate=1)
        manifests.append(run(spec, link, tmp_path / str(index)).manifest.to_json())
    assert len(made) <= shards
    for _ in range(2):
        merge(manifests, str(tmp_path / "merged.csv"))
    with (tmp_path / "merged.csv").open(newline="") as file:
        found = [(row["n"], bool(row["response"])) for row in csv.DictReader(file)]
    assert found == [(str(n), n not in (1, 5)) for n in range(6)]
    files = [part["input_path"] for part in made]
    assert [len(names) if isinstance(names, list) else 1 for names in files] == {
        1: [2], 2: [2, 1], 3: [1, 1, 1], 6: [1] * 6
    }[shards]  # fmt: skip


@pytest.mark.parametrize("name", ["mine.jsonl", "out-0.jsonl", "out-1.jsonl.errors.jsonl"])
def test_what_is_merged_takes_nobodys_place(link: ForeignLink, tmp_path: Path, name: str) -> None:
    rows = [{"prompt": "a"}, {"prompt": "[[status 400]]"}]
    manifests = run_shards(link, tmp_path, write_rows(tmp_path / "in.jsonl", rows), 2, ".jsonl")
    (tmp_path / "mine.jsonl").write_text("precious\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "link.jsonl").symlink_to(tmp_path / name)
    for target in (name, "link.jsonl"):
        with pytest.raises(InvalidInput, match=r"no batch has written it|a shard's own"):
            merge(manifests, str(tmp_path / target))
    (tmp_path / "link.jsonl").unlink()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_merging_again(link: ForeignLink, tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "[[status 400]]"}, {"prompt": "c"}]
    source = write_rows(tmp_path / "in.jsonl", rows)
    manifests = run_shards(link, tmp_path, source, 3, ".jsonl")
    target = tmp_path / "merged.jsonl"
    names = [target, Path(f"{target}.errors.jsonl"), Path(f"{target}.manifest.json")]
    whole = merge(manifests, str(target))
    first = [name.read_bytes() for name in names]
    assert merge(manifests, str(target)) == whole
    assert [name.read_bytes() for name in names] == first
    target.unlink()  # as where a merge was killed before its last step
    assert merge(manifests, str(target)) == whole
    other = tmp_path / "other"
    other.mkdir()
    elsewhere = run_shards(link, other, write_rows(other / "in.jsonl", rows), 3, ".jsonl")
    with pytest.raises(InvalidInput, match=r"belongs to another input \(.*shard-0000"):
        merge(elsewhere, str(target))
    assert merge(manifests[:2], str(target))["shards"] == 2  # split anew into fewer


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("what", ["output", "errors"])
def test_a_shard_that_lost_rows_after_its_batch_is_not_merged(
    link: ForeignLink, tmp_path: Path, suffix: str, what: str
) -> None:
    rows = [{"prompt": "a"}, {"prompt": "[[status 400]]"}] * 4
    manifests = run_shards(link, tmp_path, write_rows(tmp_path / "in.jsonl", rows), 2, suffix)
    changed = Path(manifests[1][f"{what}_path"])
    if what == "errors":
        changed.write_bytes(b"")
    elif suffix == ".parquet":
        parquet.write_table(parquet.read_table(changed).slice(0, 1), changed)
    else:
        changed.write_text(changed.read_text().splitlines(True)[0])
    with pytest.raises(InvalidInput, match=f"{changed.name} has [01] rows, and by its manifest"):
        merge(manifests, str(tmp_path / f"merged{suffix}"))
    assert not (tmp_path / f"merged{suffix}").exists()


def test_custom_ids_that_two_shards_have_are_told_of(
    link: ForeignLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [batch_row("a", "one"), batch_row("b", "two"), batch_row("a", "three")]
    manifests = run_shards(link, tmp_path, write_rows(tmp_path / "in.jsonl", rows), 3, ".jsonl")
    merge(manifests, str(tmp_path / "merged.jsonl"))
    assert '1 rows have the custom_id of an earlier shard\'s row, the first "a"' in caplog.text
    assert [row["custom_id"] for row in read_rows(tmp_path / "merged.jsonl")] == ["a", "b", "a"]


def test_a_shard_whose_file_is_gone_or_broken_is_named(link: ForeignLink, tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "[[status 400]]"}] * 4
    manifests = run_shards(link, tmp_path, write_rows(tmp_path / "in.jsonl", rows), 2, ".csv")
    second = Path(manifests[1]["output_path"])
    second.write_text(second.read_text().replace(",", ";", 3))
    with pytest.raises(InvalidInput, match=rf"{second.name}, row 1: it has \d fields, the header"):
        merge(manifests, str(tmp_path / "merged.csv"))
    second.unlink()
    with pytest.raises(InvalidInput, match=rf"{second.name} does not exist any more; clear that"):
        merge(manifests, str(tmp_path / "merged.csv"))


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".csv.gz", ".parquet"])
def test_a_shard_whose_file_cannot_be_read_is_named(
    link: ForeignLink, tmp_path: Path, suffix: str
) -> None:
    """And not the merged one, which could have been written."""
    rows = [{"prompt": f"{number} {'x' * 50}"} for number in range(400)]
    manifests = run_shards(link, tmp_path, write_rows(tmp_path / "in.jsonl", rows), 2, suffix)
    second = Path(manifests[1]["output_path"])
    data = second.read_bytes()
    broken = (
        data[: len(data) // 2] if suffix != ".parquet" else data[:4] + b"\xff" * 200 + data[204:]
    )
    second.write_bytes(broken)
    with pytest.raises(
        InvalidInput, match=rf"(?s)merge: {second.name} cannot be read: .*; clear that"
    ):
        merge(
            [{**m, "output_path": Path(m["output_path"]).name} for m in manifests],
            str(tmp_path / f"merged{suffix}"),
            to_path=lambda text: tmp_path / text,
        )
    assert not (tmp_path / f"merged{suffix}").exists()


def test_the_types_of_columns_do_not_depend_on_the_shards(
    link: ForeignLink, tmp_path: Path
) -> None:
    """Without a value a column is text in its shard, and one of whole numbers is of integers."""
    rows = [
        {"prompt": "a", "none_here": None, "whole_here": 1, "mixed": 1, "never": None},
        {"prompt": "b", "none_here": 5, "whole_here": 1.5, "mixed": "x", "never": None},
    ]
    source = write_rows(tmp_path / "in.jsonl", rows)
    whole = BatchSpec(input_path=str(source), output_path=str(tmp_path / "whole.parquet"))
    run(whole, link, tmp_path / "whole")
    merge(run_shards(link, tmp_path, source, 2, ".parquet"), str(tmp_path / "merged.parquet"))
    merged, expected = (
        parquet.read_table(tmp_path / f"{name}.parquet") for name in ("merged", "whole")
    )
    assert merged.schema.types == expected.schema.types
    assert merged.to_pylist() == expected.to_pylist()


@pytest.mark.parametrize(
    "values", [[2**53 + 1, 2, 2.5, 3.5], [1.0, 2.0, "a", "b"], [1, 2, True, [1]]]
)
def test_values_that_no_common_type_holds_are_the_text_of_the_unsplit_run(
    link: ForeignLink, tmp_path: Path, values: list[Any]
) -> None:
    rows = [{"prompt": f"p{index}", "x": value} for index, value in enumerate(values)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    run(
        BatchSpec(input_path=str(source), output_path=str(tmp_path / "whole.parquet")),
        link,
        tmp_path / "w",
    )
    merge(run_shards(link, tmp_path, source, 2, ".parquet"), str(tmp_path / "merged.parquet"))
    merged, whole = (
        parquet.read_table(tmp_path / f"{name}.parquet").column("x").to_pylist()
        for name in ("merged", "whole")
    )
    assert merged == whole


def test_csv_files_of_different_columns_are_named(tmp_path: Path) -> None:
    for name, header in (("a", "text,n"), ("b", "text,m")):
        (tmp_path / f"{name}.csv").write_text(f"{header}\nx,1\n")
    with pytest.raises(
        InvalidPrompts, match=r"b\.csv has the columns text, m, and .*a\.csv text, n"
    ):
        split(str(tmp_path / "*.csv"), str(tmp_path / "work"), shards=2)


def test_the_whole_has_the_longest_sending_and_all_advice(
    link: ForeignLink, tmp_path: Path
) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    manifests = run_shards(link, tmp_path, write_rows(tmp_path / "in.jsonl", rows), 2, ".jsonl")
    for manifest, seconds, text in zip(manifests, (1.0, 4.0), ("one", "two"), strict=True):
        manifest |= {"sending_seconds": seconds, "advice": [{"text": "both"}, {"text": text}]}
    whole = merge(manifests, str(tmp_path / "merged.jsonl"))
    assert (whole["sending_seconds"], whole["rows_per_second"]) == (4.0, 0.5)
    assert [each["text"] for each in whole["advice"]] == ["both", "one", "two"]


def test_manifests_of_before_a_field_are_merged(link: ForeignLink, tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    manifests = run_shards(link, tmp_path, write_rows(tmp_path / "in.jsonl", rows), 2, ".jsonl")
    del manifests[0]["cut_off"]
    assert merge(manifests, str(tmp_path / "merged.jsonl"))["cut_off"] == 0
