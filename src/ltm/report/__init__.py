"""Pictures of what merging does, curves of what it costs, and reports that put them together.

Import from the modules: `heatmaps` (merge weights over images), `groups` (what became one token),
`curves` (accuracy against cost, tokens and bottleneck by block), `report` (one HTML file).
"""
