"""What a trace of ours is called by: how torch.profiler's files name the run, its steps and its causes."""

METADATA = "trainwright_run_hash"
"""The top-level key that holds the run's hash."""
STEP = "ProfilerStep#"
"""The annotation around a step, as torch.profiler's own schedule makes it too; the step's number follows."""
CAUSE = "cause: "
"""The annotation around what the clock charges to a cause, which follows."""
