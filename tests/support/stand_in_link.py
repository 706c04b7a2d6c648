"""A link whose other workers say what this one says: a strategy of several hosts in
one process, for what it does before it exchanges anything of weight."""

import contextlib

import numpy as np

from tfdp.hosts.host_link import HostLink


class StandInLink(HostLink):
    """Made as by `make_link`."""

    name = "stand-in"
    settings_of_others = None
    exchanges_of_steps = ()

    def __init__(self, cluster, communication):
        super().__init__(cluster.rank, cluster.workers, communication.timeout_seconds)
        self.hosts = [f"host{rank}" for rank in range(cluster.workers)]
        self.settings = None

    def gather(self, blob, label, channel="host", most_bytes=0):
        # Worker 0's numbers, where only it says some.
        is_chiefs = label.startswith(("seed", "variable"))
        other = blob or bytes(most_bytes if is_chiefs else 8)
        if label == "settings":
            self.settings = blob
            other = self.settings_of_others or blob
        return [blob if r == self.rank else other for r in range(self.workers)]

    def sum(self, arrays, label, channel="step", wire_dtype=None, packed=()):
        # In the type that came, as the links do.
        return [np.asarray(a) * np.asarray(a).dtype.type(self.workers) for a in arrays]

    def sent_bytes(self, channel=None):
        return 0

    def exchange_seconds(self, channel):
        return 0.0

    def on_failure(self, listener):
        pass

    def news(self):
        return None

    def announce(self, exchanges, channel):
        pass

    def start(self, call, *, only_within_a_loop=False):
        pass

    def loop_of_steps(self, made, planned, name, compared=None):
        return contextlib.nullcontext()

    def close(self):
        pass

    def _nothing(self, *arguments, **options):
        raise NotImplementedError

    reduce_scatter = all_gather = all_to_all = gather_memory = _nothing
    share_note = without_note = leave_note = wait_for_notes = _nothing
    on_note = give_up = _nothing
