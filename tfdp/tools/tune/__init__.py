"""Which settings train fastest: what is tried, in which order, and who wins.

setting    one way to train
space      the ways that differ, of those that are allowed
proposal   how fast the simulator thinks each of them is
search     which of them is tried next
tuning     the trials, and the rounds in which the best meet the defaults
decision   who wins
words      all of it, as an explanation
"""
