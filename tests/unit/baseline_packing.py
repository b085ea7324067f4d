"""The shapes of the WebQA baseline, which the configs for WebQA must reproduce."""

from mmqa_jax.data.packing import PackingConfig

# The baseline's shapes in training: max_len_a 400 (200 region slots + caption), max_len_b 109,
# 512 columns. configs/webqa has those of inference too.
VLP_WEBQA = PackingConfig(
    buckets=((0, 512), (2, 312)),
    slots_per_picture=100,
    region_dim=2048,
    position_dim=1607,
    max_caption_tokens=200,
    max_question_tokens=109,
    max_answer_tokens=109,
    max_pair_tokens=109,
    attend_empty_slots=True,
)
