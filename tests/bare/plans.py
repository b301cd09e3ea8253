"""Small models and clusters for the planner's tests, and one big pair. Figures are round, not a product's."""

from trainwright.spec.cluster import (
    ClusterSpec,
    Curve,
    Device,
    Fabric,
    Node,
    OverlapRates,
    PeakFlops,
    Provenance,
    Rates,
)
from trainwright.spec.model import (
    DenseMlp,
    GroupedQueryAttention,
    LatentAttention,
    LayerGroup,
    LayerSpec,
    ModelSpec,
    MoeMlp,
    Rope,
)


def dense_model(
    *,
    num_layers: int = 4,
    d_model: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    d_ff: int = 128,
    vocab_size: int = 512,
    gated: bool = True,
    tied: bool = False,
    window: int | None = None,
    norm: str = "rmsnorm",
    bias: bool = False,
) -> ModelSpec:
    attention = GroupedQueryAttention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        d_head=d_model // num_heads,
        sliding_window=window,
        qkv_bias=bias,
        out_bias=bias,
    )
    layer = LayerSpec(attention=attention, mlp=DenseMlp(d_ff=d_ff, gated=gated, bias=bias))
    return ModelSpec.parse(
        {
            "name": "small",
            "d_model": d_model,
            "vocab_size": vocab_size,
            "tied_embeddings": tied,
            "norm": norm,
            "layer_groups": [LayerGroup(repeat=num_layers, pattern=(layer,))],
            "rope": Rope(),
            "max_positions": 1 << 20,
        }
    )


def moe_model(
    *,
    num_layers: int = 4,
    num_dense: int = 1,
    num_experts: int = 8,
    top_k: int = 2,
    d_ff_shared: int = 32,
    mtp_depth: int = 0,
    latent: bool = True,
) -> ModelSpec:
    """DeepSeek's kind, small: latent attention, first layers dense, shared experts."""
    base = dense_model(num_kv_heads=4)
    plain = base.layers[0].attention
    attention = LatentAttention(num_heads=4, q_lora_rank=24, kv_lora_rank=16, d_nope=16, d_rope=8, d_value=16)
    moe = MoeMlp(num_experts=num_experts, top_k=top_k, d_ff=32, d_ff_shared=d_ff_shared)
    chosen = attention if latent else plain
    groups = [
        LayerGroup(repeat=1, pattern=(LayerSpec(attention=chosen, mlp=DenseMlp(d_ff=128)),))
        for _ in range(num_dense)
    ]
    groups.append(LayerGroup(repeat=num_layers - num_dense, pattern=(LayerSpec(attention=chosen, mlp=moe),)))
    return base.changed(name="small-moe", layer_groups=tuple(groups), mtp_depth=mtp_depth)


def cluster(
    *,
    devices: int = 8,
    concurrent: int | None = None,
    memory_bytes: int = 10**9,
    nics: int = 8,
    overlap: float = 0.5,
    launch_s: float = 1e-6,
) -> ClusterSpec:
    flat = Curve(size=(1.0,), fraction=(0.7,))
    assumed = Provenance(kind="assumed", source="a test's round number")
    return ClusterSpec(
        name="test",
        device=Device(
            name="T1",
            kind="cuda",
            peak_flops_per_s=PeakFlops(fp32=1e13, bf16=1e14, fp8=2e14),
            memory_bytes=memory_bytes,
            memory_bytes_per_s=1e12,
            num_sms=100,
        ),
        node=Node(devices=devices, concurrent_devices=concurrent or devices),
        fabric=Fabric(
            link="link",
            link_domain=devices,
            link_bytes_per_s=1e11,
            network="net" if nics else "none",
            nics_per_node=nics,
            nic_bytes_per_s=1e10 if nics else 0.0,
        ),
        rates=Rates(
            matmul={"fp32": flat, "bf16": flat, "fp8": flat},
            attention_forward={"bf16": flat},
            attention_backward={"bf16": flat},
            memory=0.8,
            launch_s=launch_s,
            link=0.8,
            link_latency_s=2e-6,
            network=0.8,
            network_latency_s=1e-5,
            overlap=OverlapRates(dp=overlap),
        ),
        usd_per_device_hour=2.0,
        provenance=dict.fromkeys(
            ("device", "node", "fabric", "rates", "usd_per_device_hour", "framework_bytes"), assumed
        ),
    )


def computed_flops_per_token(model: ModelSpec, seq_len: int) -> float:
    """As `flops_per_token` counts a causal mask, with each key that it leaves: a query meets its own too, so that
    an average one meets (s + 1) / 2 of s, and not s / 2."""
    more = sum(
        count
        * layer.attention.score_flops_per_key
        * sum(min(at + 1, _window(layer, seq_len)) for at in range(seq_len))
        for layer, count in model.layer_counts().items()
    )
    return 6.0 * model.active_matmul_params + 3.0 * more / seq_len


def _window(layer: LayerSpec, seq_len: int) -> int:
    return layer.attention.sliding_window or seq_len
