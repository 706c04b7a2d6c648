"""Analysis of a step while its graph is built: the step, its rows, its losses."""
