"""Training and fine-tuning of token-merging models: Algorithm 1 of the paper, on Lightning Fabric.

Import from the modules: `run` (train a model in one call), `config` (settings; imports nothing
heavy), `recipes` (named settings).
"""
