"""GPUs for tests: the real `pynvml` over a stub library whose devices a test scripts and changes.

    stub = NvmlStub.build(tmp_path)
    stub.write(FakeGpu("GPU-a", used=3 * GIB, processes={4711: 3 * GIB}))
    subprocess.run(command, env={**os.environ, **stub.environ})

`environ` has to be set before the process under test starts: LD_LIBRARY_PATH is read once, and reaches
supervisors too, since it is on the allow-list. The
devices file is read on every call into the library and replaced as a whole, so that a test can
change it under a running process.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scripts.compiler import c_compiler

GIB = 1024**3
HANGS, CRASHES = -1, -2
_SOURCE = Path(__file__).with_name("nvml_stub.c")


@dataclass(frozen=True)
class FakeMig:
    """A MIG device at `place` of its GPU; sizes in bytes."""

    uuid: str
    place: int = 0
    name: str = "NVIDIA H100 MIG 2g.20gb"
    total: int = 20 * GIB
    reserved: int = 0
    used: int = 0
    processes: Mapping[int, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        fields = ("mig", self.place, self.uuid, self.name, self.total, self.reserved, self.used)
        return ["\t".join(map(str, fields)), *_process_lines(self.processes)]


@dataclass(frozen=True)
class FakeGpu:
    """A GPU; sizes in bytes, `processes` pid -> bytes. `mig` None is a GPU that knows no MIG;
    a tuple, even an empty one, is a GPU in MIG mode. `result` is what every query answers."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    total: int = 80 * GIB
    reserved: int = 0
    used: int = 0
    processes: Mapping[int, int] = field(default_factory=dict)
    capability: tuple[int, int] = (9, 0)
    mig: tuple[FakeMig, ...] | None = None
    result: int = 0

    def lines(self) -> list[str]:
        mode = -1 if self.mig is None else 1
        sizes = (self.total, self.reserved, self.used)
        fields = ("gpu", self.uuid, self.name, *sizes, *self.capability, mode, self.result)
        lines = ["\t".join(map(str, fields)), *_process_lines(self.processes)]
        return lines + [line for mig in self.mig or () for line in mig.lines()]


@dataclass(frozen=True)
class NvmlStub:
    """A compiled stub and its devices file."""

    folder: Path

    @classmethod
    def build(cls, folder: Path) -> NvmlStub:
        """Compiles the stub into `folder` (some 0.2 s with gcc); no GPU until `write`."""
        folder.mkdir(parents=True, exist_ok=True)
        library = folder / "libnvidia-ml.so.1"
        soname = f"-Wl,-soname,{library.name}"
        command = [*c_compiler(), "-shared", "-fPIC", "-Wall", "-Werror", soname]
        subprocess.run([*command, "-o", str(library), str(_SOURCE), "-ldl"], check=True)
        stub = cls(folder)
        stub.write()
        return stub

    @property
    def environ(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(self.folder), os.environ.get("LD_LIBRARY_PATH"))))
        return {"LD_LIBRARY_PATH": path}

    def write(
        self, *gpus: FakeGpu, init_result: int = 0, memory_results: tuple[int, int] = (0, 0)
    ) -> None:
        """Replaces all devices at once. `init_result` is what nvmlInit answers
        (`HANGS` nothing, `CRASHES` ends its process), `memory_results`
        what the memory queries of version 1 and 2 answer."""
        lines = [f"init\t{init_result}", "memory\t{}\t{}".format(*memory_results)]
        lines += [line for gpu in gpus for line in gpu.lines()]
        new = self.folder / "devices.new"
        new.write_text("\n".join(lines) + "\n", encoding="utf-8")
        new.replace(self.folder / "devices")


def _process_lines(processes: Mapping[int, int]) -> list[str]:
    return [f"proc\t{pid}\t{used}" for pid, used in processes.items()]
