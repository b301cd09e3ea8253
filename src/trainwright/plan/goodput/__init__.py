"""What failures cost a run. A job of N nodes, each failing r times a day at random, fails every M = 1/(N r); then
it loses what it did since its last save, and the time until it is back.

`closed_forms.py` says what share of the time is left, `intervals.py` how often to save, `simulation.py` plays it,
and `answer.py` puts a run's own numbers in. All times are seconds. "Effective" is the effective training time
ratio, ETTR: time of work that counts, over all time from the start to the end (Kokolis et al., arXiv:2410.21680).
"""
