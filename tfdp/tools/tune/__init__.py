"""Which settings train fastest: what is tried, in which order, and who wins.

space      the settings that differ proposal   the simulated speed of each tuning
the trials, the search, and the rounds that compare the best words      the report
"""
