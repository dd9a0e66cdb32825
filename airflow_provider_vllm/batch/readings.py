"""What vLLM's metrics said during a batch: looks go in, advice on the server's settings comes out."""

from __future__ import annotations

from collections.abc import Mapping

from airflow_provider_vllm.diagnosis.runtime_advice import Advice, advise


class Readings:
    """The first and the last look, and the largest values in between."""

    def __init__(self) -> None:
        self._first: Mapping[str, float] = {}
        self._last: Mapping[str, float] = {}
        self._peak: dict[str, float] = {}

    def add(self, samples: Mapping[str, float]) -> None:
        """One look; an empty one (not vLLM, or no answer) says nothing."""
        if not samples:
            return
        self._first = self._first or samples
        self._last = samples
        for name, value in samples.items():
            self._peak[name] = max(value, self._peak.get(name, value))

    def advice(self) -> tuple[Advice, ...]:
        """What would make the next batch faster; empty where nothing was seen."""
        return advise(self._first, self._last, peak=self._peak) if self._last else ()
