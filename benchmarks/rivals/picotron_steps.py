"""Steps of picotron's own model, parallel forms and pipeline on CPU; `debug_model.py` runs it with a checkout of
huggingface/picotron (59714b1) beside this environment's torch.

Its flash kernels are for GPUs, and are not called here; a stand-in lets them be imported. Weights are its own
initial ones and the batch is random tokens: it would fetch both. Without clipping, which it doesn't have, and with
AdamW as it comes on a CPU. Rank 0 prints one line of JSON: seconds of each step after the warm-up.

    torchrun --nproc-per-node 2 picotron_steps.py CHECKOUT '{"tp": 2}' STEPS SEQ_LEN GLOBAL_BATCH
"""

import json
import os
import sys
import time
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import AdamW

WARM_UP = 3
VOCAB = 2048

torch.cuda.synchronize = lambda device=None: None  # it waits for a GPU after each message
os.environ |= {"DTYPE": "float32", "DEVICE": "cpu", "FLASH_ATTEN": "0"}
for name, function in {
    "flash_attn.flash_attn_interface": "flash_attn_func",
    "flash_attn.layers.rotary": "apply_rotary_emb",
    "flash_attn.ops.triton.layer_norm": "layer_norm_fn",
}.items():
    sys.modules[name] = ModuleType(name)
    setattr(sys.modules[name], function, None)
sys.path.insert(0, sys.argv[1])

import picotron.process_group_manager as pgm  # noqa: E402
from picotron.context_parallel.context_parallel import apply_context_parallel  # noqa: E402
from picotron.data_parallel.data_parallel import DataParallelBucket  # noqa: E402
from picotron.model import Llama  # noqa: E402
from picotron.pipeline_parallel.pipeline_parallel import (  # noqa: E402
    PipelineParallel,
    train_step_pipeline_1f1b,
)
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel  # noqa: E402


class RandomTokens:
    """In place of its data loader: the same microbatches in every step."""

    def __init__(self, microbatches: int, micro_batch: int, seq_len: int) -> None:
        self.grad_acc_steps = microbatches
        tokens = torch.randint(0, VOCAB, (micro_batch, seq_len + 1))
        self._batch = {
            "input_ids": tokens[:, :-1].contiguous(),
            "target_ids": tokens[:, 1:].contiguous(),
            "position_ids": torch.arange(seq_len).expand(micro_batch, -1).contiguous(),
        }

    def __next__(self) -> dict[str, torch.Tensor]:
        return dict(self._batch)


def built(degrees: dict[str, int], seq_len: int) -> torch.nn.Module:
    config = SimpleNamespace(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=VOCAB,
        max_position_embeddings=seq_len,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
    )
    model = Llama(config)
    if degrees["tp"] > 1:
        model = apply_tensor_parallel(model)
        model.reset_parameters()
    if degrees["pp"] > 1:
        model = PipelineParallel(model, config)
    if degrees["cp"] > 1:
        model = apply_context_parallel(model)
    return DataParallelBucket(model) if degrees["dp"] > 1 else model


def main() -> None:
    degrees = {"tp": 1, "cp": 1, "pp": 1, "dp": 1} | json.loads(sys.argv[2])
    steps, seq_len, global_batch = (int(each) for each in sys.argv[3:6])
    dist.init_process_group("gloo")
    pgm.setup_process_group_manager(
        tp_size=degrees["tp"], cp_size=degrees["cp"], pp_size=degrees["pp"], dp_size=degrees["dp"]
    )
    torch.manual_seed(dist.get_rank())
    model = built(degrees, seq_len)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    microbatches = 4 if degrees["pp"] > 1 else 1
    micro_batch, local_length = global_batch // degrees["dp"] // microbatches, seq_len // degrees["cp"]
    batches = RandomTokens(microbatches, micro_batch, local_length)
    shapes = (micro_batch, local_length, 256)
    seconds = []
    for _ in range(WARM_UP + steps):
        start_s = time.perf_counter()
        optimizer.zero_grad()
        if degrees["pp"] > 1:
            train_step_pipeline_1f1b(model, batches, shapes, torch.device("cpu"), torch.float32)
        else:
            batch = next(batches)
            if degrees["dp"] > 1:
                model.require_backward_grad_sync = True
            logits = model(input_ids=batch["input_ids"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["target_ids"].flatten())
            loss.backward()
            loss.item()
        optimizer.step()
        if hasattr(model, "reset"):
            model.reset()
        dist.barrier()
        seconds.append(time.perf_counter() - start_s)
    assert all(parameter.grad is not None for parameter in model.parameters())
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds[WARM_UP:]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
