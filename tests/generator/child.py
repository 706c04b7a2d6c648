"""A process that runs programs, and the watch over it.

A program that hangs or crashes takes its process with it: the next one gets a new one.
Hanging is told by the processor, not by the clock, so that a loaded machine is none.
"""

import gc
import multiprocessing
import os
import time

from tests.generator.program import Program

# A waiting process uses no processor; one that works on a loaded machine gets some.
# TensorFlow waits up to 60 seconds for the thread that tunes a pipeline, when its
# iterator is dropped at a bad moment, and a program has several.
IDLE_SECONDS = 200.0
# No program here works for so long.
MOST_SECONDS = 900.0
# TensorFlow keeps what it traced.
PROGRAMS_PER_PROCESS = 60
DEVICES = 4


class Child:
    """Gives the verdict on programs in a process of their own.

    Args:
      plant: the name of a fault in `planted.FAULTS` that the process begins with.
      idle_seconds: how long a program may use no processor.
    """

    #: More arguments of `__main__.replay` for a program of this child.
    replayed_with = ""

    def __init__(self, plant=None, idle_seconds=IDLE_SECONDS):
        self._plant, self._idle_seconds = plant, idle_seconds
        self._process = None
        self._served = 0

    def judge(self, program: Program):
        """The `Verdict`; "hang" or "died" where the process gave none."""
        from tests.generator.compare import Verdict

        self._make_ready()
        self._connection.send(program)
        try:
            if self._answers():
                verdict = self._connection.recv()
                if verdict.kind == "crash":
                    # TensorFlow's collectives stay aborted until the process ends:
                    # every later program would crash as well.
                    self.close()
                return verdict
        except (EOFError, ConnectionError):
            self._process.join(60)
            code = self._process.exitcode
            self.close()
            return Verdict("died", f"exit code {code}", "the process ended by itself")
        self.close()
        return Verdict("hang", "hang", f"no processor used for {self._idle_seconds} s")

    def close(self):
        """Ends the process."""
        self._end_process()

    def _end_process(self):
        if self._process is None:
            return
        self._process.kill()
        self._process.join()
        self._connection.close()
        self._process = None

    @staticmethod
    def serve(connection, plant):
        """What the process does: answers programs with verdicts."""
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import tensorflow as tf

        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * DEVICES,
        )
        from tests.generator import planted
        from tests.generator.compare import judge

        planted.plant(plant)
        connection.send("ready")
        while (program := connection.recv()) is not None:
            connection.send(judge(program))
            # Iterators that are dropped young keep nobody waiting; see IDLE_SECONDS.
            gc.collect()

    def _make_ready(self):
        if self._process is None or self._served >= PROGRAMS_PER_PROCESS:
            self._end_process()
            self._start()
        self._served += 1

    def _start(self):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=self.serve, args=(theirs, self._plant), daemon=True
        )
        self._process.start()
        theirs.close()
        self._served = 0
        self._connection.recv()

    def _answers(self):
        """Whether an answer came before the process was idle for too long."""
        began = last_worked = time.monotonic()
        used = self._processor_seconds()
        while not self._connection.poll(1.0):
            now = time.monotonic()
            # A hundredth of a processor: what threads that only look around use.
            if self._processor_seconds() - used > 0.02 * (now - last_worked) + 0.5:
                used, last_worked = self._processor_seconds(), now
            if now - last_worked > self._idle_seconds or now - began > MOST_SECONDS:
                return False
        return True

    def _processor_seconds(self):
        try:
            with open(f"/proc/{self._process.pid}/stat") as file:
                fields = file.read().rsplit(")", 1)[1].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
