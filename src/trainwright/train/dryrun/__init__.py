"""One rank's step without the other ranks and without numbers: the trainer's own program on fake tensors."""
