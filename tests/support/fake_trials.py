"""Trials that nobody trains: speeds are made up, and so is the time that they take."""

import random

from tfdp.tools.commands.tune_processes import Measured, TrialFailed
from tfdp.tools.simulator.model import GradientSize, ModelProfile
from tfdp.tools.tune.proposal import TrialFacts
from tfdp.tools.tune.space import TrialLayout

#: Four layers of 4, 4, 1 and 0.25 MB, and their biases.
SIZES = (4_000_000, 4_000, 4_000_000, 4_000, 1_000_000, 1_000, 250_000, 40)
MODEL = ModelProfile("fake", tuple(GradientSize(size, float(size)) for size in SIZES))
HOSTS = TrialLayout(2, 1, 64, "sockets")


class FakeTrials:
    """Measures for `TuneRun`.

    Args:
      speed_of: samples per second by setting; may raise TrialFailed.
      noise: of each figure, as a part of it: the standard deviation of a normal one.
      seconds: that a trial takes, by the clock.
      seed: of the noise.
    """

    target = "fake.py"

    def __init__(self, speed_of, *, noise=0.0, seconds=10.0, seed=0, engine="sockets"):
        self.speed_of, self.noise, self.seconds = speed_of, noise, seconds
        self.random, self.engine = random.Random(seed), engine
        self.now = 0.0
        self.tried = []

    def clock(self):
        return self.now

    def measure(self, setting, with_facts=False):
        self.tried.append(setting)
        self.now += self.seconds
        speed = self.speed_of(setting) * (1 + self.random.gauss(0.0, self.noise))
        seconds = HOSTS.rows / speed
        facts = TrialFacts(MODEL, seconds)
        return Measured((seconds,) * 3, self.engine, facts)


def fails(reason="ValueError: no such thing"):
    raise TrialFailed(reason)
