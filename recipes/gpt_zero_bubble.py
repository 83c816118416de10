from jaxpara import recipe


def gpt_zero_bubble():
    """ZB-V over pp2: each stage holds a run of layers from either end of the model, and weight gradients fill the gaps. Ring attention over sp2
    and tp2 inside a stage.

    jaxpara train gpt_zero_bubble
    Collectives: as gpt_1f1b over pp; over sp a ring in every attention layer (by all-gathers on CPU, whose permutes cannot stand where only some
    stages run); over tp two all-reduces per block and direction.
    """
    return recipe("gpt_single").change(mesh=dict(pp=2, sp=2, tp=2), parallel=dict(schedule="zb_v", sp_order="zigzag"), train=dict(microbatches=4))
