from jaxpara import Model, Optim, Precision, Run, Train


def gpt2_124m():
    """GPT-2 small: 124,439,808 parameters, bfloat16 compute, ZeRO-3 over as many devices as there are.

    jaxpara train gpt2_124m
    Collectives: parameters all-gathered per layer over fsdp in forward and backward, gradients reduce-scattered.
    """
    return Run(model=Model(style="gpt2", layers=12, width=768, heads=12, vocab=50257, max_positions=1024, dropout=0.0),
               precision=Precision(compute="bfloat16"),
               optim=Optim(lr=6e-4, schedule="cosine", warmup=100),
               train=Train(batch=32, seq=1024, steps=1000)).change(mesh=dict(fsdp="auto"))
