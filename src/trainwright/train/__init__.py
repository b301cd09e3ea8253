"""What is done: the model, its parallel forms, data, the training loop, and micro-measurements. Torch lives here.

Read `model/transformer.py`, then `parallelize.py`, then `loop.py`.
"""
