"""What a server says that it should not: the key, or an answer without an end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from airflow_provider_vllm.batch import client
from airflow_provider_vllm.batch.spec import BatchSpec
from tests.batch.helpers import ForeignLink, read_rows, run
from tests.fakes.endpoint import ThreadedEndpoint


@pytest.mark.parametrize("pack", [1, 4])
def test_the_key_in_a_refusal_is_hidden(
    server: ThreadedEndpoint, tmp_path: Path, pack: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The errors file may be read by others, and the log by everybody."""
    server.behaviour.api_key = "s3cret"
    caplog.set_level("DEBUG")
    spec = BatchSpec(
        # The refusal repeats it.
        prompts=[{"prompt": text, "params": {"temperature": "s3cret"}} for text in "abcd"],
        output_path=str(tmp_path / "out.jsonl"),
        max_error_rate=1,
        pack=pack,
    )
    run(spec, ForeignLink(server.base_url, api_key="s3cret"), tmp_path)
    errors = read_rows(tmp_path / "out.jsonl.errors.jsonl")
    assert len(errors) == 4
    assert all("got '***'" in row["error"]["message"] for row in errors)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"s3cret" in path.read_bytes() for path in files)
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("key", ["plain", "sk/abc+123==", 'with "quotes" \\ and \u00fc'])
def test_a_key_is_hidden_in_any_form_that_json_may_give_it(key: str) -> None:
    text = f"no access with {key}!"
    for ascii in (True, False):
        written = json.dumps(text, ensure_ascii=ascii)
        for form in (written, written.replace("/", "\\/")):
            body = form.encode()
            for secret in client._secrets(key):
                body = body.replace(secret, client.HIDDEN)
            assert json.loads(body) == "no access with ***!"


@pytest.mark.parametrize("pack", [1, 4])
def test_an_answer_that_is_too_large_costs_its_own_row(
    link: ForeignLink, tmp_path: Path, pack: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MOST_ANSWER", 1 << 20)
    prompts = ["a", "b", f"[[say {'long' * 400_000}]]", "d"]
    result = run(BatchSpec(prompts=prompts, max_error_rate=1, pack=pack), link, tmp_path)
    assert result.manifest.outcomes == {"ok": 3, "rejected": 1}
    assert result.errors is not None
    (error,) = result.errors
    assert (error["row"], error["code"]) == (2, "answer_too_large")
    assert error["message"] == "the answer has more than 1 MiB"
    assert link.losses == []
