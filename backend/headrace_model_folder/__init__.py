"""Reads and validates a Hugging Face model folder without torch; does not read weights.

Path through the room: `folder.ModelFolder.open` calls `config`, which has the model's family
(`families`) describe it (`description`), and `generation_defaults` (settings), `tensor_index` over
`safetensors_header` (where each tensor lies), `expected_tensors` (which tensors the description
names, by `formats` where another tool made the weights), `fused_tensors` (projections that share a
tensor), `token_table` and `chat_template` (text). A GGUF file takes the way through `gguf` instead.
Every file is read through `bounded_files`, which knows the size limits and keeps reads inside the
folder. Whatever is wrong ends as one `InvalidModelFolder`. Beside that path: `measured_loss`, for
who wants to know what quantizing cost; and `draft_heads`.
"""

from headrace_model_folder.chat_template import ChatTemplate
from headrace_model_folder.config import ModelConfig
from headrace_model_folder.description import ModelDescription
from headrace_model_folder.draft_heads.eagle3_folder import Eagle3Folder
from headrace_model_folder.draft_heads.mtp_folder import open_mtp
from headrace_model_folder.errors import InvalidModelFolder
from headrace_model_folder.expected_tensors import expected_tensors, needless_biases
from headrace_model_folder.families.eagle3 import Eagle3Head
from headrace_model_folder.folder import ModelFolder
from headrace_model_folder.formats.layer_format import LayerFormat, Layout, Role, SourceTensor
from headrace_model_folder.formats.quantization_config import FolderQuantization
from headrace_model_folder.generation_defaults import GenerationDefaults
from headrace_model_folder.measured_loss import MeasuredLoss, read_measured_loss
from headrace_model_folder.rope_config import RopeConfig
from headrace_model_folder.safetensors_header import TensorRecord
from headrace_model_folder.token_table import TokenTable, read_token_table, token_bytes

__all__ = [
    "ChatTemplate",
    "Eagle3Folder",
    "Eagle3Head",
    "FolderQuantization",
    "GenerationDefaults",
    "InvalidModelFolder",
    "LayerFormat",
    "Layout",
    "MeasuredLoss",
    "ModelConfig",
    "ModelDescription",
    "ModelFolder",
    "Role",
    "RopeConfig",
    "SourceTensor",
    "TensorRecord",
    "TokenTable",
    "expected_tensors",
    "needless_biases",
    "open_mtp",
    "read_measured_loss",
    "read_token_table",
    "token_bytes",
]
