"""64-bit keys in, "seen before?" or a stored number out, in 8 to 16 bytes a slot.

A Python set of a million integers takes 70 MB; this takes 16. Invariants: a key of 0 is stored as 1 (0 marks a
free slot), the table is never more than 60 % full, and nothing is ever removed.
"""

from __future__ import annotations

from array import array

MASK64 = (1 << 64) - 1
SMALLEST = 1 << 12


def _zeros(count: int) -> array[int]:
    return array("Q", bytes(8 * count))


class IntSet:
    """A set of 64-bit keys that only grows. `expected` sizes the table so that it need not grow."""

    def __init__(self, expected: int = 0) -> None:
        slots = SMALLEST
        while slots * 6 < expected * 10:
            slots *= 2
        self._keys = _zeros(slots)
        self._mask = slots - 1
        self._room = slots * 6 // 10

    def add(self, key: int) -> bool:
        """Add a key; False when it was there."""
        key = key & MASK64 or 1
        keys, mask = self._keys, self._mask
        slot = key & mask
        while found := keys[slot]:
            if found == key:
                return False
            slot = (slot + 1) & mask
        keys[slot] = key
        self._room -= 1
        if self._room <= 0:
            self._grow()
        return True

    def __contains__(self, key: int) -> bool:
        key = key & MASK64 or 1
        keys, mask = self._keys, self._mask
        slot = key & mask
        while (found := keys[slot]) and found != key:
            slot = (slot + 1) & mask
        return bool(found)

    def _grow(self) -> None:
        old = self._keys
        slots = len(old) * 2
        self._keys, self._mask, self._room = _zeros(slots), slots - 1, slots * 6 // 10
        for key in old:
            if key:
                self.add(key)


class IntMap:
    """64-bit keys to 64-bit numbers; a later value replaces an earlier one."""

    def __init__(self) -> None:
        self._keys, self._values = _zeros(SMALLEST), _zeros(SMALLEST)
        self._mask = SMALLEST - 1
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def _slot(self, key: int) -> int:
        keys, mask = self._keys, self._mask
        slot = key & mask
        while (found := keys[slot]) and found != key:
            slot = (slot + 1) & mask
        return slot

    def put(self, key: int, value: int) -> None:
        key = key & MASK64 or 1
        slot = self._slot(key)
        if not self._keys[slot]:
            self._keys[slot] = key
            self._count += 1
        self._values[slot] = value
        if self._count * 10 > len(self._keys) * 6:
            self._grow()

    def get(self, key: int) -> int | None:
        key = key & MASK64 or 1
        slot = self._slot(key)
        return self._values[slot] if self._keys[slot] else None

    def _grow(self) -> None:
        keys, values = self._keys, self._values
        slots = len(keys) * 2
        self._keys, self._values = _zeros(slots), _zeros(slots)
        self._mask = slots - 1
        for key, value in zip(keys, values, strict=True):
            if key:
                slot = self._slot(key)
                self._keys[slot], self._values[slot] = key, value
