from jaxpara import Model, MoE, Optim, Precision, Run, Train


def qwen3_moe_30b():
    """Qwen3-30B-A3B: 30,532,122,624 parameters, 3,353,032,704 active; 128 experts of width 768 over ep8 with ragged all-to-alls, ZeRO-3 over
    the rest, full recomputation.

    jaxpara inspect qwen3_moe_30b --target tpu:v5p:4x4x4
    Collectives: per layer, parameters all-gathered over fsdp in forward and backward, gradients reduce-scattered; tokens to their experts
    and back over ep; gradients of all but experts summed over ep once a step.
    """
    return Run(model=Model(style="llama", layers=48, width=2048, heads=32, kv_heads=4, head_dim=128, ffn=6144, vocab=151936, rope_theta=1e6,
                           norm_eps=1e-6, qk_norm=True, moe=MoE(experts=128, top_k=8, ffn=768, aux_weight=0.001)),
               precision=Precision(compute="bfloat16"),
               optim=Optim(lr=3e-4, schedule="cosine", warmup=1000),
               train=Train(batch=64, seq=4096, steps=10000),
               ).change(mesh=dict(fsdp="auto", ep=8), parallel=dict(remat="full", moe_transport="ragged"))
