"""Checkpoints that can be trusted: saved beside the steps, whole or not there, and loaded by any layout.

A commit is a directory that is never changed, `step-00000040-g0002`: the step that was done, and the generation,
which counts the processes' starts. Its manifest is written last and names every file, piece and digest; a
directory without one is no commit. Pieces are blocks of the whole model's tensors, found again by name and place,
so that layout and number of processes may differ (nanotron's and PyTorch Distributed Checkpoint's idea).

Of PyTorch Distributed Checkpoint two planners are used: who of several ranks with the same block writes it, with
the check that blocks tile their tensors, and which parts of stored blocks make up a wanted one. Not its storage:
its metadata is a pickle, files carry no digest, and a flipped bit loads silently. Nor its collectives around each
save, which a thread beside the steps could not call on the groups of the steps; ranks meet in the directory.

    files.py      bytes that are on the disk when it says so; digests
    manifest.py   what a commit holds, as text that can't be changed unnoticed
    directory.py  commits of a directory: found, removed, locked
    reading.py    bytes of a commit, verified as they are read
    identity.py   whether a commit is of this run
    state.py      a rank's blocks of the whole state
    writers.py    which rank writes which block, and where in its files
    snapshot.py   a copy of the blocks in memory
    saving.py     files from the copy, in a thread
    restoring.py  the state from a commit of any layout
    memory.py     the state in the memory of hosts
    frequency.py  how often
    keeper.py     all of it around the loop
"""
