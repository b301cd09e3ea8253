"""Steps of torchtitan 0.3.0's own trainer on its debug model, on CPU; `debug_model.py` runs it in torchtitan's
environment (torch 2.13, and triton, which it imports).

torchtitan asks its device module for a GPU's name and memory; a CPU has neither, so a small stand-in answers. Text
and tokenizer are replaced by random tokens. Model, parallelization, recompute, optimizer and step are its own; of
its attentions the one that has a backward pass on a CPU. Its pipelines need a later torch and its context
parallelism an attention that a CPU lacks, so those two layouts are not here. Rank 0 prints one line of JSON:
seconds of each step after the warm-up.

    torchrun --nproc-per-node 2 torchtitan_steps.py '{"tensor_parallel_degree": 2}' STEPS SEQ_LEN GLOBAL_BATCH
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils as utils
from torch.distributed.fsdp import FSDPModule

utils.device_type = "cpu"
utils.device_module = SimpleNamespace(
    set_device=lambda device: None,
    device_count=lambda: 1,
    get_device_name=lambda device=None: "cpu",
    current_device=lambda: 0,
    get_device_properties=lambda device=None: SimpleNamespace(total_memory=2**33, name="cpu"),
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    memory_stats=lambda device=None: {},
    synchronize=lambda: None,
    memory=None,
)
utils.get_local_device = lambda: torch.device("cpu")

import torchtitan.models.llama3 as llama3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

WARM_UP = 3
VOCAB = 2048


class RandomTokens:
    """In place of a data loader: the same random batch forever."""

    def build(self, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: object) -> "RandomTokens":
        torch.manual_seed(dp_rank)
        self.tokens = torch.randint(0, VOCAB, (local_batch_size, seq_len + 1))
        return self

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            inputs = self.tokens[:, :-1].clone()
            positions = torch.arange(inputs.shape[1]).expand(inputs.shape).clone()
            yield {"input": inputs, "positions": positions}, self.tokens[:, 1:].clone()

    def state_dict(self) -> dict[str, Any]:
        return {}


def configured(degrees: dict[str, int], steps: int, seq_len: int, global_batch: int) -> Any:
    """torchtitan's configuration of its debug model, in fp32, with the recompute that it comes with."""
    config = llama3_debugmodel()
    llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
    config.model_spec = llama3.model_registry("debugmodel", attn_backend="sdpa")
    parallelism, training = config.parallelism, config.training
    parallelism.spmd_backend = "partial_dtensor"
    parallelism.data_parallel_shard_degree = 1
    for name, degree in degrees.items():
        setattr(parallelism, name, degree)
    replicas = parallelism.data_parallel_shard_degree * parallelism.data_parallel_replicate_degree
    training.seq_len, training.local_batch_size = seq_len, global_batch // replicas
    training.global_batch_size = global_batch
    training.mixed_precision_param = "float32"
    training.steps = WARM_UP + steps
    training.disable_cuda_graphs = True
    config.validator.enable = False
    config.checkpoint.enable = False
    config.metrics.log_freq = 10**9
    config.dataloader = RandomTokens()
    config.tokenizer = SimpleNamespace(build=lambda **_: None)
    type(config).to_dict = lambda self: {}
    type(config).maybe_log = lambda self: None
    return config


def main() -> None:
    steps, seq_len, global_batch = (int(each) for each in sys.argv[2:5])
    trainer = configured(json.loads(sys.argv[1]), steps, seq_len, global_batch).build()
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    batches = trainer.batch_generator(trainer.dataloader)
    seconds = []
    for step in range(WARM_UP + steps):
        trainer.step = step + 1
        start_s = time.perf_counter()
        trainer.train_step(batches)
        if torch.distributed.get_world_size() > 1:
            torch.distributed.barrier()
        seconds.append(time.perf_counter() - start_s)
    assert all(parameter.grad is not None for part in trainer.model_parts for parameter in part.parameters())
    if os.environ["RANK"] == "0":
        print(json.dumps({"seconds": seconds[WARM_UP:]}))


if __name__ == "__main__":
    main()
