from jaxpara import recipe


def gpt_tp():
    """Tensor parallelism with Megatron sequence parallelism over tp4, ZeRO-1 over dp2.

    jaxpara train gpt_tp
    Collectives: over tp, an all-gather into and a reduce-scatter out of each attention and MLP block, mirrored in backward, where
    each block's input is gathered once more; over dp, ZeRO-1's reduce-scatter and all-gather once a step.
    """
    return recipe("gpt_single").change(mesh=dict(dp=2, tp=4), parallel=dict(tp_sequence=True, zero=dict(dp=1)))
