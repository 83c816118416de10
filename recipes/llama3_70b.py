from jaxpara import recipe


def llama3_70b():
    """Llama-3 70B: 70,553,706,496 parameters, tp8 with Megatron-SP inside, ZeRO-3 over the rest, full recomputation.

    jaxpara plan llama3_70b --target cpu:512
    Collectives: as llama3_8b, over a wider tp.
    """
    return recipe("llama3_8b").change(model=dict(layers=80, width=8192, heads=64, ffn=28672), mesh=dict(tp=8),
                                      optim=dict(lr=1.5e-4), train=dict(batch=128))
