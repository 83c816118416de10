from jaxpara import recipe


def gpt_pipeline():
    """Circular pipeline over pp2, two chunks of layers per stage, with tp2 inside a stage (Megatron-SP) and ZeRO-3 over fsdp2.

    jaxpara train gpt_pipeline
    Collectives: over pp, a permute of 1/2 of a border's tokens in every tick, forward and back, and once a step an all-to-all and an all-gather
    that spread the head over the stages; over tp and fsdp in every tick what they do without a pipeline in every micro-batch.
    """
    return recipe("gpt_single").change(mesh=dict(pp=2, fsdp=2, tp=2), parallel=dict(schedule="circular", chunks=2, tp_sequence=True),
                                       train=dict(microbatches=4))
