"""One file for each way of spreading the model; `train/parallelize.py` says in which order they apply."""
