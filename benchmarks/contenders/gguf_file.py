"""``write_bfloat16``: the weights of a GGUF file in bfloat16, so that llama.cpp computes with the same numbers.

matrix -> bfloat16(float32(matrix)), rounded to nearest even as torch does;   vector -> float32
"""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

WRITTEN_BY_THE_WRITER = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture")
OF_QUANTISED_FILES = ("general.quantization_version",)


def write_bfloat16(source: Path, target: Path) -> None:
    """Converts ``source``; ``target`` appears when it is complete."""
    reader = GGUFReader(source)
    unfinished = target.with_suffix(".unfinished")
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(unfinished, arch=reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name in WRITTEN_BY_THE_WRITER + OF_QUANTISED_FILES:
            continue
        value = LlamaFileType.MOSTLY_BF16.value if field.name == "general.file_type" else field.contents()
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim > 1:
            bits = quantize(values, GGMLQuantizationType.BF16)
            writer.add_tensor(tensor.name, bits, raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(target)
