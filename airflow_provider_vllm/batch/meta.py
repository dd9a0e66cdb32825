"""What a journal was written for, and whose it is: read back, it says whether a batch may go on with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import orjson


@dataclass(frozen=True)
class Meta:
    """`input` is the digest of the input, `inputs` its paths as given.

    `errors_path` is where the error rows go, where the spec names it.
    `owner` is a name of the task's run that stays over its tries, where it has one; `run` that of the whole run
    that the task belongs to.
    """

    fingerprint: str
    input: str
    output_path: str | None
    inputs: tuple[str, ...] = ()
    owner: str = ""
    run: str = ""
    errors_path: str | None = None

    def to_json(self) -> bytes:
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2)

    @classmethod
    def from_json(cls, data: bytes) -> Meta:
        """Fields of a later version are left out. Raises ValueError for anything that no batch has written."""
        found = orjson.loads(data)
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, not an object")
        texts = {name: found.get(name, "") for name in ("fingerprint", "input", "owner", "run")}
        output, inputs = found.get("output_path"), found.get("inputs", [])
        errors_at = found.get("errors_path")
        known = {"fingerprint", "input", "output_path"} <= found.keys()
        if not (
            known
            and all(isinstance(text, str) for text in texts.values())
            and (output is None or isinstance(output, str))
            and (errors_at is None or isinstance(errors_at, str))
            and isinstance(inputs, list)
            and all(isinstance(path, str) for path in inputs)
        ):
            raise ValueError("its fields are not those of a batch")
        return cls(output_path=output, inputs=tuple(inputs), errors_path=errors_at, **texts)

    def may_be_taken_by(self, other: Meta) -> bool:
        """Whether `other` is the same batch again: of the same owner, or else of the same input paths.

        Lists of prompts have no path: those of two known owners must have the same content. Two tasks of one run
        are the same batch only where they ask the same of the same model.
        """
        if self.owner and self.owner == other.owner:
            return True
        if self.inputs != other.inputs:
            return False
        if self.is_rival_of(other):
            return False
        unnamed = not (self.owner and other.owner)
        return bool(self.inputs) or unnamed or self.input == other.input

    def is_rival_of(self, other: Meta) -> bool:
        """Whether `other` is another task of the same run that asks something else.

        An empty fingerprint is not known yet.
        """
        same_run = self.run and self.run == other.run and self.owner != other.owner
        differ = other.fingerprint and self.fingerprint != other.fingerprint
        return bool(same_run and differ)
