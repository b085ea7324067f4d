"""BERT, MiniLM and RoBERTa."""

from mmqa_jax.weights.registry import HF_FOLDER, Architecture

FAMILIES = (
    Architecture(
        name="bert",
        model_types=("bert",),
        title="BERT and MiniLM encoders",
        model="bert.network.Bert",
        config="bert.network.BertConfig",
        layouts=(HF_FOLDER,),
        exports="BertModel",
        presets="bert.network.TRUNKS",
        check="encoders.text_encoders.CHECK",
    ),
)
