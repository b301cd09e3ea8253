"""Number formats of fewer than 16 bits: how a matrix becomes codes and scales, and how two of them are
multiplied. Pure functions of tensors; no model and no process group."""
