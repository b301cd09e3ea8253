"""Failures while steps run: seen, named by rank and place, and answered. docs/fault-model.md says which.

beats.py      words that each rank writes in shared memory of what it does, and its answers to questions
sights.py     what the supervisor sees of a rank: its words, and its process
hangs.py      who hangs, and where
slowness.py   who is slow
watchdog.py   looks at all ranks, names who hangs or is slow, and ends who hangs
places.py     which places of a node a run uses after failures, and with how many replicas
guard.py      losses and gradients that may move no weight
replicas.py   digests of state that several ranks have
plant.py      faults put into a run on purpose, for `chaos` and the tests
"""
