"""Draws programs for some time, makes what differs smaller, and tells."""

import collections
import dataclasses
import functools
import hashlib
import pathlib
import time

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, settings

from tests.generator.child import Child
from tests.generator.draw import programs
from tests.generator.known import is_documented, is_known
from tests.generator.program import features
from tests.generator.reduce import reduce

# Plainer programs are what all other tests are made of, and cost as much time.
LEAST_FEATURES = 6

REPLAY = """\
from tests.generator.__main__ import replay
from tests.generator.program import *

program = {program!r}

if __name__ == "__main__":
    raise SystemExit(replay(program{more}))
"""


class Found(AssertionError):
    """A program differs: the round ends."""

    def __init__(self, program, verdict):
        super().__init__(verdict.signature)
        self.program, self.verdict = program, verdict


@dataclasses.dataclass
class Finding:
    """A program that differs, the smallest that was seen.

    Args:
      seed: of the round that drew it.
      program, verdict: see `compare.judge`.
      more: arguments for its replay.
      programs: the others that it explains; see `Search.is_explained`.
    """

    seed: int
    program: object
    verdict: object
    more: str = ""
    programs: set = dataclasses.field(default_factory=set)

    @property
    def file(self):
        """A Python file that runs it."""
        return REPLAY.format(program=self.program, more=self.more)

    def __str__(self):
        return (
            f"--- finding of seed {self.seed}, met by {len(self.programs)} more: "
            f"{self.verdict.kind}: {self.verdict.signature}\n{self.verdict.text}\n\n"
            f"{self.file}"
        )


class Search:
    """Programs for `minutes`, in rounds with seeds of their own.

    Args:
      minutes: how long programs are drawn; the last one is finished.
      seed: of the first round; the others follow.
      folder: where each finding is written, as a file that runs; None: nowhere.
      reduce_seconds: how long a smaller program is looked for, at most.
      switched_on: lines of `known.KNOWN` that are drawn all the same.
      plant: see `child.Child`.
      child: what gives the verdicts; None: a `Child`.
    """

    def __init__(
        self,
        minutes,
        seed,
        folder=None,
        reduce_seconds=240.0,
        switched_on=(),
        plant=None,
        say=None,
        child=None,
    ):
        self.seed, self.folder = seed, folder
        self.say = say or functools.partial(print, flush=True)
        self._seconds = 60 * minutes
        self._reduce_seconds = reduce_seconds
        self._switched_on = switched_on
        self._child = child or Child(plant)
        self.counts = collections.Counter()
        self.refusals = collections.Counter()
        self.skipped = collections.Counter()
        self.findings = []
        self.verdicts = {}

    def run(self, stop_at_first=False):
        """Draws until the time is over; the findings."""
        self._end = time.monotonic() + self._seconds
        try:
            while time.monotonic() < self._end:
                self.say(f"round with seed {self.seed}")
                self._round(self.seed)
                self.seed += 1
                if stop_at_first and self.findings:
                    break
        finally:
            self._child.close()
        return self.findings

    def _round(self, seed):
        """One seed: until something new differs, or thirty programs."""

        def meet(program):
            if len(features(program)) < LEAST_FEATURES:
                hypothesis.reject()
            if is_known(program, self._switched_on):
                hypothesis.reject()
            if time.monotonic() > self._end:
                return
            verdict = self.judge(program)
            if verdict.is_finding and not self.is_explained(program, verdict):
                raise Found(program, verdict)

        test = hypothesis.seed(seed)(
            settings(
                # A tenth of them is small, whatever is asked for.
                max_examples=30,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
                verbosity=Verbosity.quiet,
                report_multiple_bugs=False,
                print_blob=False,
            )(hypothesis.given(programs())(meet))
        )
        try:
            test()
        except Found as found:
            smallest = self._reduced(found.program, found.verdict)
            self._note(Finding(seed, *smallest, self._child.replayed_with))

    def _reduced(self, program, verdict):
        """The smallest program with a verdict like this that is found in time."""
        end = time.monotonic() + self._reduce_seconds
        smallest = [verdict]

        def differs(candidate):
            if time.monotonic() > end or is_known(candidate, self._switched_on):
                return False
            found = self.judge(candidate)
            if found.is_finding and found.is_like(verdict):
                smallest[0] = found
                return True
            return False

        self.say("looking for a smaller program")
        return reduce(program, differs), smallest[0]

    def judge(self, program):
        """The verdict, counted; refusals that are documented count as such."""
        if program in self.verdicts:
            return self.verdicts[program]
        began = time.monotonic()
        verdict = self._child.judge(program)
        if verdict.kind == "refused":
            self.refusals[verdict.signature] += 1
            if not is_documented(program, verdict.text):
                verdict = dataclasses.replace(verdict, kind="crash")
        self.verdicts[program] = verdict
        self.counts[verdict.kind] += 1
        took = f"{time.monotonic() - began:.0f} s"
        self.say(f"{verdict.kind} {verdict.signature} ({took}): {program!r}")
        if verdict.kind == "skipped":
            if verdict.signature not in self.skipped:
                self.say(verdict.text[-500:])
            self.skipped[verdict.signature] += 1
        return verdict

    def is_explained(self, program, verdict):
        """Whether a finding of this kind has nothing that the program has not."""
        for finding in self.findings:
            if finding.verdict.is_like(verdict) and (
                features(finding.program) <= features(program)
            ):
                finding.programs.add(program)
                return True
        return False

    def _note(self, finding):
        self.findings.append(finding)
        self.say(str(finding))
        if self.folder is None:
            return
        folder = pathlib.Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(repr(finding.program).encode()).hexdigest()[:10]
        comment = "".join(
            f"# {line}\n" for line in str(finding.verdict.text).splitlines()
        )
        (folder / f"finding_{finding.seed}_{digest}.py").write_text(
            comment + finding.file
        )

    def summary(self):
        """What was run, refused and found."""
        lines = [f"programs by verdict: {dict(self.counts)}"]
        lines += [f"refused {n} times: {text}" for text, n in self.refusals.items()]
        lines += [f"skipped {n} times: {text}" for text, n in self.skipped.items()]
        lines += [str(finding) for finding in self.findings]
        lines.append(f"{len(self.findings)} findings")
        return "\n".join(lines)
