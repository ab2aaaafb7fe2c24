"""Training and fine-tuning of token-merging networks: Algorithm 1 of the paper.

`ltm.train` and `ltm.finetune` (`run`) make a `Task` of their arguments and run it. The design:

- A `Task` (`task`) is one kind of training. It opens the data, builds the network, gives the loss
  of a batch, scores the network on held-out images, and names the columns of its log. It knows no
  loop. `Classification` (`classification`) and `Distillation` (`distillation`, which `tuning` runs
  for a time) are here; `ltm.detection.task` has the dense one.
- The `Trainer` (`trainer`) is the one loop: optimiser and learning rate (`optimisation`), gradient
  accumulation and clipping, averaged weights, epochs without merging, annealed noise, one process
  or many (`fabric`, on Lightning), the state of a checkpoint. It knows no labels, boxes or methods.
- What a method does in training it says itself (`ltm.methods.base`): learning rates of its
  parameters, a loss of its own, noise, class statistics.
- A run (`run`) is a folder: `config.yaml`, `checkpoints/` (`checkpoint`), `log.csv`,
  `metrics.json`, `curves.png`, and `model/` of the best epoch. An epoch depends on nothing but the
  state before it, so a run that was stopped resumes bit for bit.
- Settings (`settings`) are frozen values in groups; YAML files, options of the commands and keyword
  arguments of the verbs are three ways to write them. `recipes` are named ones. Neither imports
  torch.
- A loss that is not finite stops the run before any weight moves, and names the module that made
  it (`non_finite`). `trainable` says what trains, LoRA adapters included.
"""
