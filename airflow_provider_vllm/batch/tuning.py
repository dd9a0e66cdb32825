"""How many rows in flight, and how many to a request: measured speed in, the next setting out.

Hill climbing: one move at a time is tried, between two measurements of the present setting, and kept when
it is faster by `GAIN`; a difference beyond `CLEAR` is believed at once. Pure: `now` and all counts are
arguments. What a server refuses (429, 503) is not seen here: `refusals` keep the sender below the limit then.
Invariants: a preemption takes a trial back, and shrinks where none is going on; a queue on the server stops
growth, and is shortened where that costs no speed; a smaller limit has to beat the better of the two
measurements, since one that fell into a slow moment of the machine would make anything look good; only rows
that were sent under a setting count for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

START = 256  # as many as vLLM runs at once by default on a GPU below 70 GB; 1024 above (EngineArgs)
MOST = 1024
PACK = 16
PACK_FROM = (
    150.0  # rows/s: below it the HTTP server is no bottleneck (about 1 ms of its CPU a request)
)
GAIN = 1.05
CLEAR = 1.25
NO_LOSS = 0.99  # what a smaller setting may cost when it only shortens the server's queue
WINDOW = 0.7
BURSTS = 2  # equal rows that started together end together: a window is several times the limit
LONGEST_WINDOW = 30.0
HOLD = 20.0
FEWER = 0.8  # of the rows in flight, after a preemption


@dataclass(frozen=True)
class Setting:
    """What the sender obeys."""

    limit: int
    pack: int


@dataclass(frozen=True)
class Sample:
    """What was seen up to `now`: rows answered, and the server's own numbers."""

    now: float
    rows: int
    waiting: int | None = None
    preemptions: int = 0


@dataclass(frozen=True)
class Tuning:
    """Where the climb is: `trial` is tried against `setting`, which gave `before` rows/s; it gave `tried`."""

    setting: Setting
    may_pack: bool
    may_grow: bool
    since: Sample
    skip: int
    trial: Setting | None = None
    needed: float = GAIN
    before: float | None = None
    tried: float | None = None
    moves: tuple[str, ...] = ()
    hold_until: float = 0.0
    most: int = MOST
    shrunk: bool = False  # `skip` is over rows that were sent under a limit that was too large

    @property
    def now_used(self) -> Setting:
        return self.trial if self.trial and self.tried is None else self.setting


def begin(
    setting: Setting, sample: Sample, *, may_pack: bool, may_grow: bool, most: int = MOST
) -> Tuning:
    """A climb from a setting. `may_pack` and `may_grow` say which of its two numbers may change.

    `most` is the largest limit that may be tried.
    """
    grow = ("unqueue", "double", "halve") * may_grow
    pack = ("pack",) * may_pack
    return Tuning(
        setting, may_pack, may_grow, sample, skip=setting.limit, most=min(most, MOST),
        moves=grow + pack if setting.pack > 1 else pack + grow,
    )  # fmt: skip


def advance(tuning: Tuning, sample: Sample) -> Tuning:
    """The state after a look at the counts; the same object when it is too early to say anything."""
    since = tuning.since
    rows, seconds = sample.rows - since.rows, sample.now - since.now
    if tuning.may_grow and not tuning.shrunk and sample.preemptions > since.preemptions:
        return _pressed(tuning, sample)
    if tuning.skip:
        early = rows < tuning.skip and not (tuning.shrunk and seconds > LONGEST_WINDOW)
        return tuning if early else replace(tuning, since=sample, skip=0, shrunk=False)
    if sample.now < tuning.hold_until or not _enough(tuning.now_used, rows, seconds):
        return tuning
    rate = rows / seconds
    if tuning.trial is None or tuning.before is None:
        return _next_trial(replace(tuning, before=rate, trial=None), sample)
    if tuning.tried is not None:
        return _judged(tuning, sample, rate)
    smaller = tuning.trial.limit < tuning.setting.limit
    if rate >= tuning.before * CLEAR and not smaller:
        return _accepted(tuning, sample, rate)
    if rate * CLEAR <= tuning.before:
        return _rejected(tuning, sample, None)
    return replace(tuning, tried=rate, since=sample, skip=tuning.trial.limit)


def _judged(tuning: Tuning, sample: Sample, after: float) -> Tuning:
    """The trial against what its setting gave before and after it."""
    assert tuning.trial and tuning.before and tuning.tried
    smaller = tuning.trial.limit < tuning.setting.limit
    present = max(tuning.before, after) if smaller else (tuning.before + after) / 2
    if tuning.tried >= present * tuning.needed:
        return _accepted(tuning, sample, None)
    return _rejected(tuning, sample, after)


def _accepted(tuning: Tuning, sample: Sample, rate: float | None) -> Tuning:
    """On with the trial; `rate` is its speed where it was measured just now."""
    assert tuning.trial
    moves = tuning.moves
    if tuning.trial.limit > tuning.setting.limit:
        moves = ("double", *_without(moves, "double", "halve"))
    elif tuning.trial.limit < tuning.setting.limit and tuning.needed == GAIN:
        moves = ("halve", *moves)
    better = replace(
        tuning, setting=tuning.trial, trial=None, before=rate, tried=None, moves=moves,
        since=sample, skip=tuning.now_used.limit,
    )  # fmt: skip
    return better if rate is None else _next_trial(better, sample)


def _rejected(tuning: Tuning, sample: Sample, rate: float | None) -> Tuning:
    """On with the setting; `rate` is its speed where it was measured just now, else it is measured anew."""
    kept = replace(
        tuning, trial=None, before=rate, tried=None, since=sample, skip=tuning.now_used.limit,
        hold_until=0.0 if tuning.moves else sample.now + HOLD,
    )  # fmt: skip
    return kept if rate is None or not tuning.moves else _next_trial(kept, sample)


def _without(moves: tuple[str, ...], *names: str) -> tuple[str, ...]:
    return tuple(move for move in moves if move not in names)


def _left(tuning: Tuning) -> tuple[str, ...]:
    """The moves that were not judged yet. What comes once, or only after a success, comes back where it broke off."""
    setting, trial, moves = tuning.setting, tuning.trial, tuning.moves
    if trial is None:
        return moves
    if trial.pack != setting.pack:
        return ("pack", *moves)
    doubled = trial.limit > setting.limit * 3 // 2
    return ("double", *moves) if doubled else moves


def _pressed(tuning: Tuning, sample: Sample) -> Tuning:
    """A trial is taken back (one of fewer rows is kept), else there are fewer in flight; then no growth for a while."""
    setting, trial = tuning.setting, tuning.trial
    if trial is None:
        setting = Setting(max(1, int(setting.limit * FEWER)), setting.pack)
    elif trial.limit < setting.limit:
        setting = trial
    return replace(
        tuning, setting=setting, trial=None, before=None, tried=None, since=sample,
        skip=tuning.now_used.limit, shrunk=True, moves=_without(_left(tuning), "double"),
        hold_until=sample.now + HOLD,
    )  # fmt: skip


def after_a_gap(tuning: Tuning, sample: Sample) -> Tuning:
    """Nothing was sent for a while, or the server is another one: what was measured is forgotten."""
    return replace(
        tuning, trial=None, before=None, tried=None, since=sample, skip=tuning.setting.limit,
        shrunk=False, moves=_left(tuning),
    )  # fmt: skip


def without_packs(tuning: Tuning, sample: Sample) -> Tuning:
    """The server turned out not to offer packs."""
    alone = replace(
        tuning, setting=Setting(tuning.setting.limit, 1), trial=None, may_pack=False,
        moves=_without(tuning.moves, "pack"),
    )  # fmt: skip
    return after_a_gap(alone, sample)


def _enough(setting: Setting, rows: int, seconds: float) -> bool:
    """Whether a window says something; rows that take minutes are not waited for so often."""
    if seconds >= LONGEST_WINDOW:
        return rows >= setting.limit
    return seconds >= WINDOW and rows >= max(50, setting.limit * BURSTS)


def _next_trial(tuning: Tuning, sample: Sample) -> Tuning:
    """Start the first move that makes sense, or hold when there is none."""
    assert tuning.before is not None
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


def _queued(sample: Sample, setting: Setting) -> bool:
    """Whether more rows wait on the server than run there. Up to that, the queue is what keeps the engine full."""
    return sample.waiting is not None and sample.waiting * 2 > setting.limit


def _moved(tuning: Tuning, move: str, sample: Sample) -> Setting | None:
    now, queued = tuning.setting, _queued(sample, tuning.setting)
    if move == "pack":
        fast = tuning.before is not None and tuning.before >= PACK_FROM
        if now.pack == 1:
            return Setting(now.limit, PACK) if fast else None
        return Setting(now.limit, 1)
    if move == "unqueue":
        shorter = max(8, now.limit - (sample.waiting or 0) * 4 // 5)
        return Setting(shorter, now.pack) if queued and shorter < now.limit else None
    if move in ("double", "grow"):
        limit = min(tuning.most, now.limit * 2 if move == "double" else now.limit * 5 // 4 + 1)
        return Setting(limit, now.pack) if limit > now.limit and not queued else None
    limit = now.limit // 2 if move == "halve" else now.limit * 4 // 5
    return Setting(limit, now.pack) if limit >= 8 else None
