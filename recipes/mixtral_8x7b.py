from jaxpara import Model, MoE, Optim, Precision, Run, Train


def mixtral_8x7b():
    """Mixtral 8x7B: 46,702,792,704 parameters, 12,879,925,248 active; ep4 with ragged all-to-alls, ZeRO-3 over the rest, full recomputation.

    jaxpara inspect mixtral_8x7b --target tpu:v5p:4x4x4
    Collectives: per layer, parameters all-gathered over fsdp in forward and backward (experts: 1/4 of them per device of ep), gradients
    reduce-scattered; tokens to their experts and back over ep; gradients of all but experts summed over ep once a step.
    """
    return Run(model=Model(style="llama", layers=32, width=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=32000, rope_theta=1e6,
                           moe=MoE(experts=8, top_k=2, aux_weight=0.001)),
               precision=Precision(compute="bfloat16"),
               optim=Optim(lr=3e-4, schedule="cosine", warmup=1000),
               train=Train(batch=64, seq=4096, steps=10000),
               ).change(mesh=dict(fsdp="auto", ep=4), parallel=dict(remat="full", moe_transport="ragged"))
