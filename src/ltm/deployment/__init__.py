"""Take a model away: ONNX, torch.export programs, int8, OpenVINO, the Hugging Face hub.

Import from the modules: `program` (torch.export), `onnx`, `quantise` (int8), `openvino`, `hub`,
`parity` (does the copy say the same?), `runtime` (run an ONNX file), `prediction` (streams of
images through whatever can classify them).
"""
