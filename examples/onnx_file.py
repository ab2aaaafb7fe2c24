"""From the package's own network to an ONNX file that ONNX Runtime runs.

The same in the shell: `ltm export --model demo_vit --pretrained --method ltm --ratio 0.6
--output runs/onnx`.
"""

import tempfile
from pathlib import Path

import numpy as np
import onnxruntime

import ltm


def main() -> tuple[int, ...]:
    """The shape of what ONNX Runtime answers."""
    with tempfile.TemporaryDirectory() as folder:
        source = ltm.ModelSource(model="demo_vit", pretrained=True)
        print(ltm.export(source, folder, method="ltm", ratio=0.6, batch_sizes=(1, 2)))
        session = onnxruntime.InferenceSession(Path(folder) / "model.onnx")
        (logits,) = session.run(None, {"images": np.zeros((3, 3, 224, 224), np.float32)})
    return logits.shape


if __name__ == "__main__":
    print("logits:", main())
