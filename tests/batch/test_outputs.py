"""Files that are there already: nobody else's is lost."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from airflow_provider_vllm.batch.run import check_inputs, run_batch
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import (
    InvalidInput,
    InvalidPrompts,
    TooManyErrors,
    UnsendableRows,
)
from tests.batch.helpers import LOG, ForeignLink, read_rows, run, write_rows

GOOD = [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.parametrize("explicit", [False, True])
def test_an_errors_file_of_somebody_else_stays(
    link: ForeignLink, tmp_path: Path, explicit: bool
) -> None:
    source = write_rows(tmp_path / "in.jsonl", GOOD)
    theirs = tmp_path / ("mine.jsonl" if explicit else "report.jsonl.errors.jsonl")
    theirs.write_text('{"precious": 1}\n')
    spec = BatchSpec(
        input_path=str(source),
        output_path=str(tmp_path / "report.jsonl"),
        errors_path=str(theirs) if explicit else None,
    )
    with pytest.raises(InvalidPrompts, match="no batch has written it"):
        run(spec, link, tmp_path)
    assert theirs.read_text() == '{"precious": 1}\n'


def test_a_manifest_is_neither_the_input_nor_a_file_of_somebody_else(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "o.jsonl.manifest.json", GOOD)
    output = str(tmp_path / "o.jsonl")
    with pytest.raises(InvalidPrompts, match="manifest of output_path is the input"):
        check_inputs(BatchSpec(input_path=str(source), output_path=output))
    with pytest.raises(InvalidPrompts, match="no batch has written it"):
        check_inputs(BatchSpec(prompts=["a"], output_path=output))


def test_the_outputs_are_different_files(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", GOOD)
    output = str(tmp_path / "o.jsonl")
    for errors in (output, f"{tmp_path}/./o.jsonl", f"{output}.manifest.json"):
        with pytest.raises(InvalidInput):
            check_inputs(BatchSpec(input_path=str(source), output_path=output, errors_path=errors))


def test_a_linked_output_stays_a_link(link: ForeignLink, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", GOOD)
    (tmp_path / "there").mkdir()
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "there" / "real.jsonl")
    run(BatchSpec(input_path=str(source), output_path=str(tmp_path / "out.jsonl")), link, tmp_path)
    assert (tmp_path / "out.jsonl").is_symlink()
    assert len(read_rows(tmp_path / "there" / "real.jsonl")) == 2


def test_gz_in_capitals_is_compressed(link: ForeignLink, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [*GOOD, {"prompt": "[[status 400]]"}])
    target = tmp_path / "x.jsonl.GZ"
    spec = BatchSpec(input_path=str(source), output_path=str(target), max_error_rate=1)
    result = run(spec, link, tmp_path)
    assert len(gzip.decompress(target.read_bytes()).splitlines()) == 2
    assert result.manifest.errors_path == str(tmp_path / "x.jsonl.GZ.errors.jsonl")


def test_a_glob_does_not_find_what_the_batch_writes(link: ForeignLink, tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", [*GOOD, {"prompt": "[[status 400]]"}])
    spec = BatchSpec(
        input_path=str(tmp_path / "**" / "*.json*"),
        output_path=str(tmp_path / "out.jsonl"),
        max_error_rate=1,
    )
    (tmp_path / "journal").mkdir()
    write_rows(tmp_path / "journal" / "meta.json", [])
    for _ in range(2):
        assert run(spec, link, tmp_path).manifest.rows == 3
    assert len(list(tmp_path.glob("**/*.json*"))) == 5


def test_a_url_without_a_file_system(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", GOOD)

    def to_path(text: str) -> Path:
        if "://" in text:
            raise ImportError("no s3fs")
        return Path(text)

    spec = BatchSpec(input_path=str(source), output_path="s3://bucket/out.jsonl")
    with pytest.raises(InvalidPrompts, match="install apache-airflow-providers-amazon and s3fs"):
        check_inputs(spec, to_path=to_path)
    with pytest.raises(InvalidPrompts, match="is a URL"):
        check_inputs(spec)


@pytest.mark.parametrize("ref", ["#/$defs/missing", "https://example.invalid/x.json"])
def test_a_schema_whose_reference_leads_nowhere(ref: str) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": ref}}}
    with pytest.raises(InvalidInput, match="leads nowhere"):
        check_inputs(BatchSpec(prompts=["a"], output_schema=schema))


def test_a_schema_that_refers_to_itself() -> None:
    tree = {
        "type": "object",
        "properties": {"child": {"$ref": "#/$defs/leaf"}, "up": {"$ref": "#"}},
    }
    check_inputs(BatchSpec(prompts=["a"], output_schema={**tree, "$defs": {"leaf": {}}}))


@pytest.mark.parametrize("length", [226, 245, 300])
def test_a_name_that_is_too_long(tmp_path: Path, length: int) -> None:
    output = tmp_path / ("x" * length + ".jsonl")
    with pytest.raises(InvalidPrompts, match="the file name is too long"):
        check_inputs(BatchSpec(prompts=["a"], output_path=str(output)))


def test_a_pipe_is_no_errors_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    spec = BatchSpec(
        prompts=["a"],
        output_path=str(tmp_path / "o.jsonl"),
        errors_path=str(tmp_path / "pipe"),
    )
    with pytest.raises(InvalidPrompts, match="no batch has written it"):
        check_inputs(spec)


def test_outputs_of_one_name_and_two_suffixes_share_no_file(
    link: ForeignLink, tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [*GOOD, {"prompt": "[[status 400]]"}])
    for suffix in (".csv", ".jsonl", ".jsonl.gz"):
        output = str(tmp_path / f"report{suffix}")
        spec = BatchSpec(input_path=str(source), output_path=output, max_error_rate=1)
        run_batch(spec, link, journal_dir=f"{output}.journal", log=LOG)
    files = [path.name for path in tmp_path.iterdir()]
    assert len([name for name in files if name.endswith(".errors.jsonl")]) == 3
    assert len([name for name in files if name.endswith(".manifest.json")]) == 3


def test_what_a_killed_try_left_beside_the_outputs_goes(link: ForeignLink, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", GOOD)
    ours = [tmp_path / f".out.jsonl{end}.0123abcd.part" for end in ("", ".manifest.json")]
    theirs = [tmp_path / ".out.jsonl.bak.part", tmp_path / ".other.jsonl.0123abcd.part"]
    for path in (*ours, *theirs):
        path.write_text("x")
    run(BatchSpec(input_path=str(source), output_path=str(tmp_path / "out.jsonl")), link, tmp_path)
    assert not any(path.exists() for path in ours)
    assert all(path.exists() for path in theirs)


def test_two_batches_do_not_share_an_errors_file(link: ForeignLink, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [*GOOD, {"prompt": "[[status 400]]"}])
    one, other = (
        BatchSpec(
            input_path=str(source),
            output_path=str(tmp_path / name),
            errors_path=str(tmp_path / "errors.jsonl"),
            max_error_rate=1,
        )
        for name in ("one.jsonl", "other.jsonl")
    )
    for _ in range(2):  # its own it may write again
        run_batch(one, link, journal_dir=f"{one.output_path}.journal", log=LOG)
    with pytest.raises(InvalidPrompts, match="holds the error rows of another batch"):
        run_batch(other, link, journal_dir=f"{other.output_path}.journal", log=LOG)
    assert len(read_rows(tmp_path / "errors.jsonl")) == 1


@pytest.mark.parametrize("failed", [True, False])
def test_a_clear_with_another_errors_path_takes_no_other_batch_s_file(
    link: ForeignLink, tmp_path: Path, failed: bool
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [*GOOD, {"prompt": "[[status 400]]"}])

    def go(output: str, errors: str) -> None:
        spec = BatchSpec(
            input_path=str(source),
            output_path=str(tmp_path / output),
            errors_path=str(tmp_path / errors),
            max_error_rate=0 if failed else 0.9,
        )
        run_batch(spec, link, journal_dir=str(tmp_path / f"{output}.journal"), log=LOG)

    def end(output: str, errors: str) -> None:
        if failed:
            with pytest.raises(TooManyErrors):
                go(output, errors)
        else:
            go(output, errors)

    end("one.jsonl", "one.errors.jsonl")
    end("other.jsonl", "other.errors.jsonl")
    theirs = (tmp_path / "other.errors.jsonl").read_bytes()
    with pytest.raises(InvalidPrompts, match="holds the error rows of another batch"):
        go("one.jsonl", "other.errors.jsonl")
    assert (tmp_path / "other.errors.jsonl").read_bytes() == theirs
    end("one.jsonl", "new.errors.jsonl")  # a new place is as good as the old one,
    end("one.jsonl", "new.errors.jsonl")  # and its own from then on
    write_rows(source, [{"prompt": "new"}, *[{"prompt": 1}] * 29])
    for _ in range(2):  # where no server is asked, too
        with pytest.raises(UnsendableRows, match="no server was asked"):
            go("one.jsonl", "hopeless.errors.jsonl")


def test_the_errors_of_a_list_of_prompts_take_no_file_of_somebody_else(
    link: ForeignLink, tmp_path: Path
) -> None:
    theirs = tmp_path / "report.csv"
    theirs.write_text("precious,1\n")
    spec = BatchSpec(prompts=["[[status 400]]"], errors_path=str(theirs), max_error_rate=1)
    with pytest.raises(InvalidPrompts, match="no batch has written it"):
        run(spec, link, tmp_path)
    assert theirs.read_text() == "precious,1\n"


def test_the_errors_of_yesterday_do_not_stay_beside_a_list_that_has_none(
    link: ForeignLink, tmp_path: Path
) -> None:
    errors = tmp_path / "errors.jsonl"
    for day, prompts in enumerate((["a", "[[status 400]]"], ["a", "b"])):
        spec = BatchSpec(prompts=prompts, errors_path=str(errors), max_error_rate=1)
        run_batch(spec, link, journal_dir=str(tmp_path / f"journal-{day}"), log=LOG)
        assert errors.exists() is (day == 0)


@pytest.mark.parametrize("pack", [1, 4])
@pytest.mark.parametrize("name", [None, "out.jsonl", "out.csv"])
def test_answers_that_were_cut_off_are_counted(
    link: ForeignLink,
    tmp_path: Path,
    pack: int,
    name: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They look as good as any other where only the text is kept. In every try: answers of earlier ones, too."""
    spec = BatchSpec(
        prompts=["a", "[[cut half a]]", "[[cut half a]] b", "c", "d"],
        output_path=name and str(tmp_path / name),
        pack=pack,
    )
    for _ in range(2):
        manifest = run(spec, link, tmp_path).manifest
        assert (manifest.ok, manifest.cut_off) == (5, 2)
        first = "row-2 (prompts, row 2), row-3 (prompts, row 3)"
        assert "cut off by a limit of tokens (finish_reason length): 2" in caplog.text
        assert f"the first: {first}; raise max_tokens" in caplog.text
        caplog.clear()
    assert manifest.reused == 5


@pytest.mark.parametrize(
    "line",
    [
        '{"id": "x", "custom_id": "a", "response": {}, "error": null}',
        '{"custom_id": 1, "error": "text of a user"}',
    ],
)
def test_results_are_no_errors_file(link: ForeignLink, tmp_path: Path, line: str) -> None:
    """A file of results, of any batch, has the fields of one."""
    theirs = tmp_path / "answers.jsonl"
    theirs.write_text(line + "\n")
    spec = BatchSpec(prompts=["a"], errors_path=str(theirs))
    with pytest.raises(InvalidPrompts, match="no batch has written it"):
        run(spec, link, tmp_path)
    assert theirs.read_text() == line + "\n"


@pytest.mark.parametrize("name", ["out.parquet", "out.csv", "out.jsonl"])
def test_an_input_without_a_readable_record_has_an_output(
    link: ForeignLink, tmp_path: Path, name: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{broken\n[1, 2\n")
    spec = BatchSpec(
        input_path=str(source),
        output_path=str(tmp_path / name),
        output_format="columns",
        max_error_rate=1,
    )
    assert run(spec, link, tmp_path).manifest.outcomes == {"invalid_input": 2, "ok": 0}
    assert (tmp_path / name).stat().st_size > 0


def test_tokens_of_responses_are_counted(link: ForeignLink, tmp_path: Path) -> None:
    """They have names of their own there."""
    manifest = run(BatchSpec(prompts=["a", "b"], endpoint="responses"), link, tmp_path).manifest
    assert manifest.completion_tokens == 16
    assert manifest.prompt_tokens > 0
