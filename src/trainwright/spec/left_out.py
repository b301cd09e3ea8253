"""What the program holds or sends and the planner leaves out on purpose, each with its bound: the one place where
that is said. docs/exactness.md is written from it.
"""

from typing import NamedTuple


class LeftOut(NamedTuple):
    """Something that no count has."""

    what: str
    bound: str


LEFT_OUT = (
    LeftOut(
        "tables of rotary cosines and sines, made once",
        "2 tables of (positions, d_head) for each length and format: below 0.1% of a layer's activations",
    ),
    LeftOut(
        "numbers of tokens: ids, masks of the vocabulary's part, targets, five numbers per token of the loss; "
        "weights, places and orders of what experts are given",
        "48 bytes per token of a microbatch on the first and the last stage; 96 bytes per row of experts",
    ),
    LeftOut(
        "scalars: the optimizer's step numbers, the loss, the gradient's norm", "8 bytes per parameter tensor"
    ),
    LeftOut(
        "fp8 and fp4 scales of whole tensors, and the largest values of past steps that fp8-delayed makes them of",
        "4 bytes per quantized tensor; 12 bytes per linear layer and step of fp8-delayed's history",
    ),
    LeftOut(
        "largest values and scales of the blocks of weights that are gathered as codes (gather_fp8)",
        "8 bytes per block of 128 x 128 values, or per tensor",
    ),
    LeftOut("temporaries of emulated rounding, which goes 2^17 values at a time", "2 MiB, whatever the run"),
    LeftOut(
        "statistics of routers: loads, biases that steer the choice, marks of the chosen",
        "13 bytes per token and expert in a layer's forward, 16 bytes per expert between steps",
    ),
    LeftOut(
        "what an allocator rounds up, and temporaries inside one operator", "not seen by any count of tensors"
    ),
    LeftOut("weights that FSDP2 has gathered: communication, not kept activations", "the units that are gathered"),
)

NOT_YET = (
    "fp8-delayed's first step, in which ranks ask one another as under fp8-current, as there is no history yet",
    "bytes over time: the planner's peak is within 0.5% of the recorded one over the layouts of "
    "tests/cpu/peak_cases.py, and within 1.3% where schedules split the backward or pipelines gather parameters; "
    "up to 1.7% less in stages that stay gathered and are fullest in a forward, whose temporaries aren't counted, "
    "up to 4% more in a step of one microbatch whose tokens are many beside its parameters, and 5% on a stage "
    "that isn't the fullest, where a layer is recomputed and parameters stay gathered; less by the input of a "
    "pipeline's stage in fp8 and fp4 where norms stand behind blocks alone; of runs in fp8 and fp4 "
    "few were compared in real processes",
    "masks of documents: FLOPs are those of samples of one document each, the most",
    "experts with a capacity below 1; choices that can't be even, which dryrun refuses",
    "LayerNorms, and norms over all heads under tp, with 1 + weight in the weight's place: the sum is kept",
    "Muon: its matmuls and the gathers of whole matrices aren't among the planner's counts",
)
"""What is not equal, or not compared, yet: named here and in docs/exactness.md."""
