"""Cases of several worker processes, all alive, which get turns."""
