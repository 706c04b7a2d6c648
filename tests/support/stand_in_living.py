"""In the place of `ElasticHosts`, for what a strategy does before it meets anybody."""


class StandInLivingHosts:
    """A host that is present alone."""

    comes_back, place, present, epoch = False, (0, 0), (0,), 0
    workers, skipped_updates, is_over = 2, 0, False

    def __init__(self, cluster, communication, settings):
        self.settings = settings

    def close(self):
        """Nobody hears of it."""

    def exchange_state(self, arrays):
        """Nobody has another one."""
        return list(arrays)

    def begin_fit(self):
        """No other host has ended one."""

    def end_fit(self, exchange):
        """No other host is late."""

    def begin_quorum(self, rules, like):
        """No other host comes to a round."""
