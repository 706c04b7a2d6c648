"""Files that a reader never meets half written, and what came in them, checked."""
