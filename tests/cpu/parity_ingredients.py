"""What goes into a step beside the layout, held against the plain model by `parity_cases.py`: ways to the loss."""

from typing import Any

TIED = {"tied_embeddings": True}
HEAD_BIAS = {"head_bias": True}
INTERLEAVED = {"schedule": "interleaved_1f1b"}

FUSED = {"loss_kernel": "fused"}
CHUNKS = {"loss_chunks": 3}
Z = {"z_loss": 0.1}
MUON = {"optimizer": {"name": "muon", "lr": 0.01, "warmup_steps": 0, "schedule": "constant"}}
BIASES = {"attention": {"qkv_bias": True, "out_bias": True}, "mlp": {"bias": True}}
DROPOUT = {"dropout": 0.3, "attention_kernel": "unfused"}


def again(*operations: str, **recipe: Any) -> dict[str, Any]:
    return {"recompute": "selective", "recompute_ops": operations, **recipe}


EVERY = ("attention", "norm", "activation", "mlp")

CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "unfused attention": {"recipe": {"attention_kernel": "unfused"}},
        "unfused attention with a window": {
            "recipe": {"attention_kernel": "unfused"},
            "attention": {"sliding_window": 5, "query_scale": 0.2},
        },
        "dropout": {"recipe": DROPOUT},
        "dropout, micro-batch of 4": {"recipe": {**DROPOUT, "micro_batch": 4}},
        "dropout, full recompute": {"recipe": {**DROPOUT, "recompute": "full"}},
        "dropout, recompute of every operation": {"recipe": {**again(*EVERY), **DROPOUT}},
        "muon": {"recipe": MUON},
        **{f"recompute of {op}": {"recipe": again(op)} for op in EVERY},
        "recompute of every operation": {"recipe": again(*EVERY)},
        "fused loss": {"recipe": FUSED, "ignored": True},
        "loss in chunks": {"recipe": CHUNKS, "ignored": True},
        "loss in chunks, of several sequences, tied": {"recipe": {**CHUNKS, "micro_batch": 4}, "model": TIED},
        "fused loss in chunks, head with bias": {"recipe": {**FUSED, **CHUNKS}, "model": HEAD_BIAS},
        "z-loss": {"recipe": Z, "ignored": True},
        "z-loss, fused": {"recipe": {**Z, **FUSED}},
        "z-loss, in chunks": {"recipe": {**Z, **CHUNKS}, "ignored": True},
    },
    2: {
        "tp dropout": {"tp": 2, "recipe": DROPOUT},
        "tp dropout without sequence parallelism": {"tp": 2, "recipe": {**DROPOUT, "sequence_parallel": False}},
        "tp dropout, full recompute, one key head": {
            "tp": 2,
            "recipe": {**DROPOUT, "recompute": "full"},
            "attention": {"num_kv_heads": 1},
        },
        "tp dropout, recompute of every operation": {"tp": 2, "recipe": {**again(*EVERY), **DROPOUT}},
        "pp dropout, full recompute": {"pp": 2, "recipe": {**DROPOUT, "recompute": "full"}},
        "pp dropout, interleaved": {
            "pp": 2,
            "vpp": 2,
            "recipe": {**again("attention", "mlp"), **DROPOUT, **INTERLEAVED},
        },
        **{f"dp dropout, zero {zero}": {"dp": 2, "recipe": {**DROPOUT, "zero": zero}} for zero in (0, 3)},
        "tp muon": {"tp": 2, "recipe": MUON, **BIASES},
        "tp muon, one key head": {"tp": 2, "recipe": MUON, "attention": {"num_kv_heads": 1}},
        "pp muon, tied": {"pp": 2, "recipe": MUON, "model": TIED},
        **{f"dp muon, zero {zero}": {"dp": 2, "recipe": {**MUON, "zero": zero}} for zero in range(4)},
        **{f"tp recompute of {op}": {"tp": 2, "recipe": again(op)} for op in EVERY},
        "tp recompute of norm and mlp, plain mlp": {
            "tp": 2,
            "recipe": again("norm", "mlp"),
            "mlp": {"gated": False, "activation": "gelu_tanh"},
        },
        "tp recompute of norm and activation without sequence parallelism, layernorm": {
            "tp": 2,
            "recipe": again("norm", "activation", sequence_parallel=False),
            "model": {"norm": "layernorm"},
        },
        "pp recompute of norm and activation": {"pp": 2, "recipe": again("norm", "activation")},
        **{
            f"dp recompute of norm and mlp, zero {zero}": {"dp": 2, "recipe": again("norm", "mlp", zero=zero)}
            for zero in (0, 1, 3)
        },
        "tp fused loss": {"tp": 2, "recipe": FUSED, "ignored": True},
        "tp loss in chunks": {"tp": 2, "recipe": {**CHUNKS, "micro_batch": 2}, "ignored": True},
        "tp loss in chunks without sequence parallelism, tied": {
            "tp": 2,
            "recipe": {**CHUNKS, "sequence_parallel": False},
            "model": TIED,
        },
        "tp fused loss in chunks, z-loss, head with bias": {
            "tp": 2,
            "recipe": {**FUSED, **CHUNKS, **Z},
            "model": HEAD_BIAS,
        },
        "tp z-loss": {"tp": 2, "recipe": Z, "ignored": True},
        "pp loss in chunks, tied": {"pp": 2, "recipe": {**CHUNKS, **Z}, "model": TIED},
        "pp gpipe fused loss": {"pp": 2, "recipe": {**FUSED, "schedule": "gpipe"}},
        **{f"dp loss in chunks, zero {zero}": {"dp": 2, "recipe": {**CHUNKS, "zero": zero}} for zero in range(4)},
        "dp fused loss, zero 3 tied": {"dp": 2, "recipe": {**FUSED, "zero": 3}, "model": TIED},
    },
    4: {
        "tp x dp dropout, zero 3, full recompute": {
            "tp": 2,
            "dp": 2,
            "recipe": {**DROPOUT, "zero": 3, "recompute": "full"},
        },
        "tp x pp dropout": {"tp": 2, "pp": 2, "recipe": DROPOUT},
        **{
            f"tp x dp muon, zero {zero}": {"tp": 2, "dp": 2, "recipe": {**MUON, "zero": zero}, **BIASES}
            for zero in (0, 1, 3)
        },
        "muon of more ranks than rows divide": {"dp": 4, "recipe": {**MUON, "zero": 2}, "mlp": {"d_ff": 42}},
        "hsdp muon": {"dp": 4, "recipe": {**MUON, "zero": 1, "dp_replicate": 2}},
        "dp x pp muon, zero 1 tied": {"dp": 2, "pp": 2, "recipe": {**MUON, "zero": 1}, "model": TIED},
        "tp x dp recompute of norm and activation, zero 3": {
            "tp": 2,
            "dp": 2,
            "recipe": again("norm", "activation", zero=3),
        },
        "tp x pp recompute of every operation": {
            "tp": 2,
            "pp": 2,
            "vpp": 2,
            "recipe": {**again(*EVERY), **INTERLEAVED},
        },
        "tp x dp loss in chunks, zero 3": {"tp": 2, "dp": 2, "recipe": {**CHUNKS, **Z, "zero": 3}},
        "tp x pp fused loss in chunks, tied": {
            "tp": 2,
            "pp": 2,
            "vpp": 2,
            "recipe": {**FUSED, **CHUNKS, **Z, **INTERLEAVED},
            "model": TIED,
        },
    },
    8: {
        "tp x pp x dp loss in chunks, zero 2": {"tp": 2, "pp": 2, "dp": 2, "recipe": {**CHUNKS, **Z, "zero": 2}},
    },
}
