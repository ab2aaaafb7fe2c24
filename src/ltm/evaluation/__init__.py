"""Measurements of networks: accuracy, information bottleneck, latency.

| module | holds |
|---|---|
| `evaluate` | `ltm.evaluate`: accuracy, cost and bottleneck, merged and untouched |
| `benchmark` | `ltm.benchmark`: interleaved timing of networks and methods |
| `accuracy`, `bottleneck` | the numbers of `ltm.evaluate` |
| `latency` | networks timed against the untouched one |
| `timing` | interleaved rounds, speed-ups with intervals, a lock between processes |
| `modes` | ways to run a network: eager, compiled, CUDA graph, ONNX Runtime |
| `candidates` | networks prepared for a benchmark |
| `records` | timing rows on disk, and as tables |
| `environment` | the machine and the versions of a measurement |
| `images` | images for measurements, by the name of their source |
| `reference_tome` | ToMe as published, a peer of benchmarks |
"""
