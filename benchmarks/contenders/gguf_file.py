"""``write_gguf``: the weights of a GGUF file in another format, for llama.cpp.

BF16        matrix -> bfloat16(float32(matrix)), rounded to nearest even as torch does: the numbers that pass_ext has then
Q8_0        matrix -> Q8_0
Q4_0        matrix in Q4_1 -> Q4_0; others, as the table of embeddings in Q8_0, stay
vector -> float32
"""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

WRITTEN_BY_THE_WRITER = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture")
OF_QUANTISED_FILES = ("general.quantization_version",)


def write_gguf(source: Path, target: Path, to: str = "BF16") -> None:
    """Converts ``source``; ``target`` appears when it is complete."""
    format = GGMLQuantizationType[to]
    reader = GGUFReader(source)
    unfinished = target.with_suffix(".unfinished")
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(unfinished, arch=reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name in WRITTEN_BY_THE_WRITER or (to == "BF16" and field.name in OF_QUANTISED_FILES):
            continue
        value = LlamaFileType[f"MOSTLY_{to}"].value if field.name == "general.file_type" else field.contents()
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        stays = to == "Q4_0" and tensor.tensor_type != GGMLQuantizationType.Q4_1
        if len(tensor.shape) > 1 and stays:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim > 1:
            writer.add_tensor(tensor.name, quantize(values, format), raw_dtype=format)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(target)
