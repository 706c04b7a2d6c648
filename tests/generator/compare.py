"""Runs a program on one device and on replicas; a verdict."""

import dataclasses
import re
import traceback

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.generator.build import make_model, make_strategy
from tests.generator.calls import Caller
from tests.generator.hosts import unequal_hosts
from tests.generator.one_device import (
    TWINS,
    OneDevice,
    bounds,
    is_random,
    make_rows,
    may_overflow,
    optimizers_of,
    state_of,
)
from tests.support.parity import unequal_copies
from tfdp.errors import TfdpError

# Below it a difference may be a rounding that the twins did not meet. One of Ftrl's,
# whose new weights are quotients of small differences, was 2.2 times their limit.
SMALL_EXCESS = 10.0
# What is left of a rounding in float64 (2^-29, with room for another way to round).
SHRINKS = 1e-5


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a program.

    Args:
      kind: "same", "skipped" (one device refuses it), "refused" (a typed error of
        tfdp), "differs", "crash", "hang" or "died".
      signature: the same for the same mechanism, as far as can be told.
      text: for people.
      excess: of what differs, how many times as far off as rounding explains.
      keys: the names of what differs.
    """

    kind: str
    signature: str = ""
    text: str = ""
    excess: float = np.inf
    keys: tuple[str, ...] = ()

    @property
    def is_finding(self) -> bool:
        return self.kind in ("differs", "crash", "hang", "died")

    def is_like(self, other):
        """Whether both may have one mechanism: errors must be the same."""
        if self.kind != other.kind:
            return False
        return self.kind != "crash" or self.signature == other.signature


def judge(program, make_strategy=make_strategy, *, may_repeat=True):
    """The verdict on a program that ends; the process must have enough devices.

    `may_repeat`: whether replicas can run once more, which other hosts are not told of.
    """
    failed = None
    keras.utils.clear_session(free_memory=False)
    try:
        found, found_exact, unequal = run_replicas(program, make_strategy)
    except Exception as error:
        if is_typed(error):
            return Verdict("refused", *_tell(error))
        failed = Verdict("crash", *_tell(error))
    keras.utils.clear_session(free_memory=False)
    try:
        one = OneDevice(program)
        answer, exact = one.run()
    except Exception as error:
        return Verdict("skipped", *_tell(error))
    if failed:
        return failed
    if unequal:
        return Verdict("differs", "copies differ", f"copies differ: {unequal}")
    if is_random(program) or may_overflow(program):
        return _finite_verdict(answer, found)
    answer, found = _noted_by_both(answer, found)
    exact, found_exact = _noted_by_both(exact, found_exact)
    # Most programs keep to what the last roundings explain: no twins are needed.
    for twins in (0, TWINS):
        nudged = [one.run(1 + i)[0] for i in range(twins)]
        limits = bounds(program, one, answer, nudged)
        verdict = _compared(answer, exact, found, found_exact, limits)
        if verdict.kind == "same":
            return verdict
    if may_repeat and _goes_in_float64(program, make_strategy, verdict, answer, found):
        return Verdict("same")
    return verdict


def _goes_in_float64(program, make_strategy, verdict, answer, found):
    """Whether the difference is a rounding that the twins did not meet.

    With more digits all that rounding has moved comes closer by 2^-29, and what is
    wrong by itself stays where it is. (But what went through Keras' losses: they are
    float32 whatever the policy. What they round stays a finding, for people.)
    """
    if program.policy != "float32" or not verdict.excess <= SMALL_EXCESS:
        return False
    precise = dataclasses.replace(program, policy="float64")
    keras.utils.clear_session(free_memory=False)
    try:
        precise_found, _, _ = run_replicas(precise, make_strategy)
        keras.utils.clear_session(free_memory=False)
        precise_answer, _ = OneDevice(precise).run()
    except Exception:
        return False

    def off(expected, got):
        return {key: np.max(np.abs(expected[key] - got[key])) for key in verdict.keys}

    before = off(answer, found)
    after = off(precise_answer, precise_found)
    return all(after[key] <= SHRINKS * before[key] for key in verdict.keys)


def run_replicas(program, make_strategy):
    """What the program gives under the strategy; weights whose copies differ."""
    strategy = make_strategy(program.layout)
    rows, validation = make_rows(program)
    with strategy.scope():
        model = make_model(program)
    values = Caller(program, model, rows, validation).call_all()
    state, exact = state_of(model)
    slots = [v for o in optimizers_of(model) for v in o.variables]
    unequal = unequal_copies(filter(are_copies, [*model.weights, *slots]))
    if isinstance(strategy, tfdp.MultiHostDataParallelStrategy):
        unequal += unequal_hosts(strategy, state)
    return values | state, exact, unequal


def _noted_by_both(answer, found):
    """Without what one optimizer has not noted.

    Keras' loss scaler leaves some out, and without a training step nothing is built.
    """
    apart = {key for key in set(answer) ^ set(found) if key.startswith("optimizer")}
    return tuple(
        {key: value for key, value in state.items() if key not in apart}
        for state in (answer, found)
    )


def are_copies(variable):
    """Whether replicas have one value: no seeds, and no sums until they are read."""
    on_read = tf.VariableSynchronization.ON_READ
    is_on_read = getattr(variable.value, "synchronization", None) == on_read
    return not is_on_read and "seed_generator" not in variable.path


def _finite_verdict(answer, found):
    answer, found = _noted_by_both(answer, found)
    if sorted(answer) != sorted(found):
        return _names_differ(answer, found)
    broken = [
        key
        for key, value in found.items()
        if not np.isfinite(value).all() and np.isfinite(answer[key]).all()
    ]
    if broken:
        return Verdict("differs", "not finite", f"not finite: {broken}")
    return Verdict("same")


def _names_differ(answer, found):
    text = (
        f"only on one device: {sorted(set(answer) - set(found))}; "
        f"only on replicas: {sorted(set(found) - set(answer))}"
    )
    return Verdict("differs", "names differ", text)


def _compared(answer, exact, found, found_exact, limits):
    if sorted(answer) != sorted(found):
        return _names_differ(answer, found)
    lines, keys = [], []
    for key, value in answer.items():
        if value.shape != found[key].shape:
            lines.append(
                (np.inf, f"{key}: shape {found[key].shape}, not {value.shape}")
            )
            continue
        ratio, text = _excess(value, found[key], limits[key])
        if ratio > 1:
            keys.append(key)
            lines.append((ratio, f"{key}: {text}"))
    for key, value in exact.items():
        if key not in found_exact or not np.array_equal(value, found_exact[key]):
            lines.append((np.inf, f"{key}: {found_exact.get(key)}, not {value}"))
    if not lines:
        return Verdict("same")
    lines.sort(key=lambda line: -line[0])
    where = sorted({_place(text) for _, text in lines})
    text = "\n".join(text for _, text in lines)
    return Verdict("differs", " ".join(where), text, lines[0][0], tuple(keys))


def _place(text):
    """ "weight", "optimizer" or the call and log: no numbers, no paths."""
    head = text.split(": shape")[0]
    if head.startswith(("weight", "optimizer")):
        return head.split()[0]
    return re.sub(r"^\d+-|: -?\d.*|\d+", "", head.rsplit(": ", 1)[0])


def _excess(expected, got, limit):
    """The largest difference over its limit; what is not finite must agree exactly."""
    plain = np.isfinite(expected) & np.isfinite(got)
    odd = ~plain & ~((np.isnan(expected) & np.isnan(got)) | (expected == got))
    if odd.any():
        place = tuple(np.argwhere(odd)[0])
        return np.inf, f"one device {expected[place]}, replicas {got[place]}"
    difference = np.abs(np.where(plain, expected, 0.0) - np.where(plain, got, 0.0))
    if not difference.size or difference.max() == 0:
        return 0.0, ""
    place = np.unravel_index(np.argmax(difference), difference.shape)
    text = (
        f"one device {expected[place]:.9g}, replicas {got[place]:.9g}, off by "
        f"{difference[place]:.2g}, rounding explains {limit:.2g}"
    )
    return difference[place] / max(limit, np.finfo("float32").tiny), text


def is_typed(error):
    """Whether `error` is one of tfdp's, or was raised from one."""
    while error is not None:
        if isinstance(error, TfdpError):
            return True
        error = error.__cause__
    return False


def _tell(error):
    """A signature and the whole text."""
    message = re.sub(r"\d+|0x\w+|'[^']*'", "#", str(error).strip())
    # The first line that says something.
    line = next((line for line in message.splitlines() if len(line) > 15), message)
    text = "".join(traceback.format_exception(error))
    return f"{type(error).__name__}: {line.strip()[:120]}", text[-6000:]
