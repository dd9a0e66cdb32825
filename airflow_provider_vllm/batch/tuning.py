"""How many rows in flight, and how many to a request: measured speed in, the next setting out.

Hill climbing: the rate under the present setting is the baseline, one move at a time is tried, and
kept when it is faster by `GAIN`. Pure: `now` and all counts are arguments. Invariants: a refusal (429,
503) or a preemption shrinks at once; a queue on the server stops growth, and is shortened where that
costs no speed; a trial that is no better is taken back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

START = 128
MOST = 1024
PACK = 16
PACK_FROM = (
    150.0  # rows/s: below it the HTTP server is no bottleneck (about 1 ms of its CPU a request)
)
GAIN = 1.05
NO_LOSS = 0.97  # what a smaller setting may cost when it only shortens the server's queue
WINDOW = 0.7
LONGEST_WINDOW = 30.0
HOLD = 20.0


@dataclass(frozen=True)
class Setting:
    """What the sender obeys."""

    limit: int
    pack: int


@dataclass(frozen=True)
class Sample:
    """What was seen up to `now`: rows answered, refusals, and the server's own numbers."""

    now: float
    rows: int
    refused: int = 0
    waiting: int | None = None
    preemptions: int = 0


@dataclass(frozen=True)
class Tuning:
    """Where the climb is. `trial` is the setting that is tried against `setting`."""

    setting: Setting
    may_pack: bool
    may_grow: bool
    since: Sample
    skip: int
    trial: Setting | None = None
    needed: float = GAIN
    baseline: float | None = None
    moves: tuple[str, ...] = ()
    hold_until: float = 0.0
    most: int = MOST

    @property
    def now_used(self) -> Setting:
        return self.trial or self.setting


def begin(
    setting: Setting, sample: Sample, *, may_pack: bool, may_grow: bool, most: int = MOST
) -> Tuning:
    """A climb from a setting. `may_pack` and `may_grow` say which of its two numbers may change.

    `most` is the largest limit that may be tried.
    """
    moves = ("pack",) * may_pack + ("unqueue", "double", "halve") * may_grow
    return Tuning(setting, may_pack, may_grow, sample, skip=0, moves=moves, most=min(most, MOST))


def advance(tuning: Tuning, sample: Sample) -> Tuning:
    """The state after a look at the counts; the same object when it is too early to say anything."""
    since = tuning.since
    rows, seconds = sample.rows - since.rows, sample.now - since.now
    if tuning.skip:  # what was in flight under the setting before says nothing of this one
        early = rows < tuning.skip and seconds < LONGEST_WINDOW
        return tuning if early else replace(tuning, since=sample, skip=0)
    if tuning.may_grow and sample.refused > since.refused:
        return _shrink(tuning, sample, 0.7)
    if tuning.may_grow and sample.preemptions > since.preemptions:
        return _shrink(tuning, sample, 0.8)
    if sample.now < tuning.hold_until or not _enough(tuning.now_used, rows, seconds):
        return tuning
    rate = rows / seconds
    if tuning.trial is None or tuning.baseline is None:
        return _next_trial(replace(tuning, baseline=rate, trial=None), sample)
    if rate >= tuning.baseline * tuning.needed:
        again = ("double",) if tuning.trial.limit > tuning.setting.limit else ()
        if tuning.trial.limit < tuning.setting.limit and tuning.needed == GAIN:
            again = ("halve",)
        better = replace(tuning, setting=tuning.trial, trial=None, baseline=rate)
        return _next_trial(replace(better, moves=again + tuning.moves), sample)
    # Taken back; the baseline is measured anew, since the rows' nature may drift.
    return replace(
        tuning, trial=None, baseline=None, since=sample, skip=tuning.now_used.limit,
        hold_until=0.0 if tuning.moves else sample.now + HOLD,
    )  # fmt: skip


def without_packs(tuning: Tuning, sample: Sample) -> Tuning:
    """The server turned out not to offer packs."""
    setting = Setting(tuning.setting.limit, 1)
    moves = tuple(move for move in tuning.moves if move != "pack")
    return replace(
        tuning, setting=setting, trial=None, baseline=None, moves=moves, may_pack=False,
        since=sample, skip=setting.limit,
    )  # fmt: skip


def _enough(setting: Setting, rows: int, seconds: float) -> bool:
    if seconds >= LONGEST_WINDOW:
        return rows > 0
    return seconds >= WINDOW and rows >= max(50, setting.limit)


def _shrink(tuning: Tuning, sample: Sample, factor: float) -> Tuning:
    """Fewer in flight, then a pause before any growth."""
    used = tuning.now_used
    smaller = Setting(max(1, int(used.limit * factor)), used.pack)
    return replace(
        tuning, setting=smaller, trial=None, baseline=None, since=sample, skip=used.limit,
        moves=(), hold_until=sample.now + HOLD,
    )  # fmt: skip


def _next_trial(tuning: Tuning, sample: Sample) -> Tuning:
    """Start the first move that makes sense, or hold when there is none."""
    assert tuning.baseline is not None
    moves = tuning.moves
    if not moves and sample.now >= tuning.hold_until and tuning.may_grow:
        moves = ("unqueue", "grow", "lessen")
    while moves:
        move, moves = moves[0], moves[1:]
        trial = _moved(tuning, move, sample)
        if trial is not None:
            return replace(
                tuning, trial=trial, moves=moves, since=sample, skip=tuning.setting.limit,
                needed=NO_LOSS if move == "unqueue" else GAIN,
            )  # fmt: skip
    return replace(tuning, moves=(), since=sample, hold_until=sample.now + HOLD)


def _queued(sample: Sample, setting: Setting, *, part: int) -> bool:
    """Whether more than a part of the rows in flight only wait on the server."""
    return sample.waiting is not None and sample.waiting * part > setting.limit


def _moved(tuning: Tuning, move: str, sample: Sample) -> Setting | None:
    now = tuning.setting
    if move == "pack":
        fast = tuning.baseline is not None and tuning.baseline >= PACK_FROM
        if now.pack == 1:
            return Setting(now.limit, PACK) if fast else None
        return Setting(now.limit, 1)
    if move == "unqueue":
        if not _queued(sample, now, part=4):
            return None
        return Setting(max(8, now.limit - (sample.waiting or 0) * 4 // 5), now.pack)
    if move in ("double", "grow"):
        queued = _queued(sample, now, part=10)
        limit = min(tuning.most, now.limit * 2 if move == "double" else now.limit * 5 // 4 + 1)
        return Setting(limit, now.pack) if limit > now.limit and not queued else None
    limit = now.limit // 2 if move == "halve" else now.limit * 4 // 5
    return Setting(limit, now.pack) if limit >= 8 else None
