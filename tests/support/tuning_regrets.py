"""What the defaults, and what was chosen, lose to the fastest setting of a grid.

Which setting is the fastest is chosen on every other one of the rounds that follow
those that decide, and how fast it is, and all regrets, are measured on those between;
then the other way round. The fastest of eight was partly lucky where it was chosen.
"""

import json
import pathlib
import statistics

from tfdp.tools.tune.space import Setting
from tfdp.tools.tune.tuning import decide

DECIDING = 3


def regrets(path):
    """Of the defaults, and of what would have been chosen; parts of the fastest."""
    content = json.loads(pathlib.Path(path).read_text("utf-8"))
    trials = content["trials"]
    settings = [Setting.from_json(trial["setting"]) for trial in trials]
    speeds = dict(zip(settings, trials, strict=True))
    defaults, *others = settings
    others.sort(key=lambda each: -speeds[each]["speed"])
    deciding = {each: speeds[each]["rounds"][:DECIDING] for each in settings}
    chosen = decide(
        defaults, deciding[defaults], {each: deciding[each] for each in others[:2]}
    ).winner
    rest = {each: speeds[each]["rounds"][DECIDING:] for each in settings}
    halves = [
        {each: rounds[start::2] for each, rounds in rest.items()} for start in (0, 1)
    ]
    found = [
        _measured_on(other, _fastest(half), defaults, chosen)
        for half, other in (halves, halves[::-1])
    ]
    spread = [max(rounds) / min(rounds) for rounds in rest.values()]
    return {
        "settings": len(settings),
        "best": [best.communication_line for best in map(_fastest, halves)],
        "chosen": chosen.communication_line,
        **{name: statistics.mean(one[name] for one in found) for name in found[0]},
        "rounds differ by": statistics.median(spread) - 1,
        "load": content.get("load", 0.0),
        # Of worker 0, for a step: other programs change it less than the clock.
        "processor seconds": {
            setting.communication_line: statistics.median(trial["processor"])
            for setting, trial in speeds.items()
            if trial.get("processor")
        },
    }


def _fastest(rounds):
    return max(rounds, key=lambda each: statistics.median(rounds[each]))


def _measured_on(rounds, best, defaults, chosen):
    """How fast three settings are in rounds that have chosen none of them."""
    speed = {each: statistics.median(rounds[each]) for each in rounds}
    return {
        "defaults' regret": speed[best] / speed[defaults] - 1,
        "chosen's regret": speed[best] / speed[chosen] - 1,
        "defaults' steps/s": speed[defaults],
        "chosen's steps/s": speed[chosen],
        "best's steps/s": speed[best],
    }
