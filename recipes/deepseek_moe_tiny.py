from jaxpara import recipe


def deepseek_moe_tiny():
    """The routing of DeepSeek-V3 on a small model: sigmoid scores, 2 of 4 groups, 1 shared expert, a selection bias instead of a large
    auxiliary loss, the first layer dense; a capacity of 1.5 with 64 tokens to a group, over ep4·tp2.

    jaxpara train deepseek_moe_tiny
    Collectives: fixed cells of tokens by all-to-all over ep, there and back, in forward and backward; at each block, activations
    all-gathered and reduce-scattered over tp; gradients of all but experts summed over ep once a step.
    """
    return recipe("gpt_single").change(
        model=dict(moe=dict(experts=16, top_k=4, ffn=88, shared=1, first_dense=1, score="sigmoid", scale=2.5, expert_groups=4, top_groups=2,
                            bias_rate=0.001, aux_weight=0.0001, capacity=1.5, group=64)),
        mesh=dict(ep=4, tp=2), parallel=dict(tp_sequence=True))
