from jaxpara import recipe


def llama3_70b_pipeline():
    """Llama-3 70B over nodes of eight: tp8 inside a node, interleaved 1F1B over pp8 with two chunks per stage, ZeRO-1 over the rest.

    jaxpara inspect llama3_70b_pipeline --target gpu:h100:16x8
    Collectives: over pp, borders of 1/8 of the tokens; over tp as llama3_70b; over dp a reduce-scatter and an all-gather once a step.
    """
    return recipe("llama3_70b").change(mesh=dict(pp=8, dp="auto", fsdp=1), parallel=dict(schedule="interleaved", chunks=2, remat="selective", zero=dict(dp=1, pp=1)),
                                       train=dict(microbatches=16))
