"""Program of transformers with the compressed-tensors package: logits of quantized folders.

python transformers_logits.py IDS_FILE FOLDER... : writes FOLDER.logits for each, [rows, tokens,
vocabulary] fp32. A folder named with "dequantize:" before it is restored while it is loaded.
"""

from __future__ import annotations

import sys

import torch
import transformers


@torch.no_grad()
def main(ids_file: str, *folders: str) -> None:
    """Loads each folder as anybody would."""
    transformers.utils.logging.set_verbosity_error()
    for named in folders:
        folder = named.removeprefix("dequantize:")
        options = {}
        if folder != named:
            options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
        torch.save(model(torch.load(ids_file)).logits.float(), f"{folder}.logits")


main(*sys.argv[1:])
