"""Faults within meetings: a process that kills or stops itself at a named moment.

`die=1@20@before:_decide`: worker 1 kills itself in the meeting after update 20, before
it decides; `stop=` the same with SIGSTOP, `late=` with a sleep of 12 s. `die=1@18`:
between meetings, before update 18. Each happens once: a file in the folder says so.
"""

import os
import pathlib
import signal
import threading
import time

from tfdp.hosts.elastic_all_reduce import OuterAllReduce

SIGNALS = {"die": signal.SIGKILL, "stop": signal.SIGSTOP, "late": None}
LATE_SECONDS = 12.0


class Faults:
    """What is planned for this process.

    Args:
      folder: for the files that say what has happened.
      rank: this worker.
      plans: by name what is planned; others are left alone.
    """

    def __init__(self, folder, rank, plans):
        self.folder, self.rank = pathlib.Path(folder), rank
        self._between, self._once = [], threading.Lock()
        for name in SIGNALS:
            for number, plan in enumerate(filter(None, plans.get(name, "").split(","))):
                mark = self.folder / f"{name}.{rank}.{number}"
                who, update, *where = plan.split("@")
                if who != str(rank) or mark.exists():
                    continue
                if where:
                    self._within(name, mark, int(update), *where[0].split(":"))
                else:
                    self._between.append((int(update), name, mark))

    def before_update(self, update):
        """Between meetings."""
        for planned, name, mark in self._between:
            if planned == update and not mark.exists():
                self._happen(name, mark)

    def _happen(self, name, mark):
        with self._once:  # a leader is in a meeting with several threads
            if mark.exists():
                return
            mark.write_text(str(os.getpid()))
            if SIGNALS[name] is None:
                time.sleep(LATE_SECONDS)
            else:
                os.kill(os.getpid(), SIGNALS[name])

    def _within(self, name, mark, update, when, method):
        original = getattr(OuterAllReduce, method)

        def faulty(meeting, *arguments):
            is_now = meeting._update == update
            if is_now and when == "before":
                self._happen(name, mark)
            results = original(meeting, *arguments)
            if is_now and when == "after":
                self._happen(name, mark)
            return results

        setattr(OuterAllReduce, method, faulty)
