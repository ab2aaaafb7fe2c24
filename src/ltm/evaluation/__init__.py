"""Measurements of networks: accuracy, information bottleneck, latency.

| module | holds |
|---|---|
| `measurement` | networks measured side by side on the same images: one `Measurement` a network |
| `evaluate` | `ltm.evaluate`: accuracy, cost and bottleneck, merged and untouched |
| `benchmark` | `ltm.benchmark`: interleaved timing of networks and methods |
| `accuracy`, `bottleneck` | the numbers of single passes over images |
| `latency` | interleaved rounds, speed-ups with intervals; networks timed side by side |
| `modes` | ways to run a network: eager, compiled, CUDA graph, ONNX Runtime |
| `timings` | the file of timings that benchmark runs share, and its table |
| `records` | the machine of a measurement, and numbers as text |
| `images` | images for measurements, by the name of their source |
| `reference_tome` | ToMe as published, a peer of benchmarks |
"""
