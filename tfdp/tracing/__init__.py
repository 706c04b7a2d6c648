"""Analysis of a step while its graph is built: the run, its rows, its losses."""
