"""What one rank of one run does in a step, in whole numbers: held against the trainer's program by the dry run."""
