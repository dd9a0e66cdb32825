"""A ServerSpec's engine arguments as the checks need them: by name, with vLLM's defaults."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# vLLM's own default (vllm/config/cache.py, 0.32; 0.90 up to 0.14).
DEFAULT_GPU_MEMORY_UTILIZATION = 0.92
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Options:
    """`engine_args` with names in one spelling."""

    args: Mapping[str, Any]

    @classmethod
    def of(cls, engine_args: Mapping[str, Any]) -> Options:
        return cls({name.replace("-", "_"): value for name, value in engine_args.items()})

    def get(self, name: str, default: Any = None) -> Any:
        value = self.args.get(name)
        return default if value is None else value

    def number(self, name: str, default: float) -> float:
        """A number, or the default where the value is none: vLLM itself says so at once."""
        try:
            return float(self.get(name, default))
        except (TypeError, ValueError):
            return default

    def size(self, name: str) -> int | None:
        """An integer as vLLM reads it (`4096`, `32k` = 32,000, `32K` = 32,768); None otherwise."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", str(self.get(name, "")))
        return round(float(match[1]) * _UNITS.get(match[2], 1)) if match else None

    @property
    def tensor_parallel(self) -> int:
        return max(1, int(self.number("tensor_parallel_size", 1)))

    @property
    def pipeline_parallel(self) -> int:
        return max(1, int(self.number("pipeline_parallel_size", 1)))

    @property
    def data_parallel(self) -> int:
        return max(1, int(self.number("data_parallel_size", 1)))

    @property
    def workers(self) -> int:
        """Worker processes, which on GPUs is the number of GPUs used."""
        return math.prod((self.tensor_parallel, self.pipeline_parallel, self.data_parallel))

    @property
    def gpu_memory_utilization(self) -> float:
        return self.number("gpu_memory_utilization", DEFAULT_GPU_MEMORY_UTILIZATION)
