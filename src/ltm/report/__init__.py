"""Reports and pictures of what merging does.

| module | holds |
|---|---|
| `comparison` | what a report tells: networks side by side, and sentences, the headline first |
| `documents` | `report.html` and the model card |
| `curves` | accuracy against cost; tokens and bottleneck by block |
| `pictures` | merge weights and groups over images, films |
| `visualization` | `ltm.visualize`: sheets of merge weights and groups for a network |
| `tracing` | where each patch went |
"""
