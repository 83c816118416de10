from jaxpara import Model, Optim, Precision, Run, Train


def llama3_8b():
    """Llama-3 8B: 8,030,261,248 parameters, tp4 with Megatron-SP inside, ZeRO-3 over the rest, full recomputation.

    jaxpara plan llama3_8b --target cpu:64
    Collectives: per layer, parameters all-gathered over fsdp in forward and backward, gradients reduce-scattered; activations
    all-gathered and reduce-scattered over tp at each block.
    """
    return Run(model=Model(style="llama", layers=32, width=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256,
                           rope_theta=500000.0),
               precision=Precision(compute="bfloat16"),
               optim=Optim(lr=3e-4, schedule="cosine", warmup=1000),
               train=Train(batch=64, seq=8192, steps=10000),
               ).change(mesh=dict(fsdp="auto", tp=4), parallel=dict(tp_sequence=True, remat="full"))
