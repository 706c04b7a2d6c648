"""In the place of `ElasticHosts`, for what a strategy does before it meets anybody."""


class StandInLivingHosts:
    """A host that is present alone."""

    comes_back, place, present, epoch = False, (0, 0), (0,), 0
    workers, skipped_updates = 2, 0

    def __init__(self, cluster, communication, settings):
        self.settings = settings

    def close(self):
        """Nobody hears of it."""

    def exchange_state(self, arrays):
        """Nobody has another one."""
        return list(arrays)

    def begin_quorum(self, rules, like):
        """No other host comes to a round."""
