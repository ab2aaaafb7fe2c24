"""Take a model away: files that other programs run, and predictions from any of them.

| module | holds |
|---|---|
| `export` | `ltm.export`: the files of a network, proved against it |
| `prediction` | `ltm.predict`: streams of images through a network, an ONNX file or a detector |
| `embedding` | `ltm.embed`: many images to Parquet files, in one process, several, or on Ray |
| `predictor` | `ltm.BatchPredictor`: from a batch of images to a batch of answers |
| `tables` | the Parquet files, one for each part of the images |
| `on_ray` | the same on Ray Data |
| `formats` | torch.export program, ONNX, OpenVINO: how each is written and run |
| `int8` | quantisation of ONNX files and of torch networks |
| `information` | what travels with a file: preprocessing, class names, token merging |
| `hub` | folders for the Hugging Face hub, upload and download |
"""
