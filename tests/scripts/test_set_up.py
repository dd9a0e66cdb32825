"""What the machine has to bring is asked for first, in words that say how to get it."""

from __future__ import annotations

import io

import pytest

from scripts import set_up
from scripts.progress import Progress
from scripts.venv import InstallFailed


def test_a_library_that_is_not_there_is_named_before_anything_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_BUILD", "cpu")
    monkeypatch.setattr(set_up, "LIBNUMA", "libnowhere.so.7")
    with pytest.raises(InstallFailed, match=r"system library libnowhere\.so\.7.*apt-get install"):
        set_up.set_up_vllm(Progress(1, out=io.StringIO()))
