"""Initial weights: a function of the seed, a parameter's name and the index in it, never of the layout.

Each tensor is drawn in full from a generator seeded by (seed, name), whoever asks and whatever part of it they
keep, so that any layout starts from the same model. Matrices are normal with standard deviation 0.02, those
that write to the residual stream 0.02 / sqrt(2 * layers) (GPT-2, Radford et al. 2019, s2.3); norms multiply by one
and biases are zero; sinks are as matrices. A tied head has the embedding's name.
"""

import hashlib
import math

import torch

from trainwright.spec.model import ModelSpec

STANDARD_DEVIATION = 0.02
RESIDUAL_WRITERS = ("attention.out.weight", "mlp.down.weight", "mlp.experts.down", "mlp.shared.down.weight")


def initial_value(spec: ModelSpec, seed: int, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The whole tensor of parameter `name` on the CPU. `dtype` rounds the same float32 draws."""
    name = global_name(spec, name)
    if name.endswith("norm.weight"):
        return torch.full(shape, 0.0 if spec.zero_centered_norm else 1.0, dtype=dtype)
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=dtype)
    deviation = STANDARD_DEVIATION
    if name.endswith(RESIDUAL_WRITERS):
        deviation /= math.sqrt(2 * spec.num_layers)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return (torch.randn(shape, generator=generator, dtype=torch.float32) * deviation).to(dtype)


def global_name(spec: ModelSpec, name: str) -> str:
    """A parameter's name in the whole model: a tied head is the embedding, wherever it stands."""
    return "embedding.weight" if spec.tied_embeddings and name == "head.weight" else name
