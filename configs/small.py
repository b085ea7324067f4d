"""What the `runlocal` modes of all experiments share; not an experiment itself."""

from ml_collections import ConfigDict

# Without dropout, whose programs take twice as long to compile.
TRUNK = {
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "mlp": 128,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
TOWER = {"width": 64, "layers": 2, "heads": 4, "mlp_width": 128, "embed_dim": 64}


def make_small(config: ConfigDict) -> None:
    """Shrinks a config in place to four steps of a small model from scratch, a run of seconds."""
    config.tokenizer, config.init = "corpus:2000", "scratch"
    config.model.changes = TRUNK
    if config.task == "contrastive":
        config.model.vision.update(TOWER)
    config.batches.batch_size = 8
    config.train.steps, config.train.checkpoint_every = 4, 2
    config.train.log_every = 2
    config.train.evaluate_every = 0
