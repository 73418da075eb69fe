"""A small model folder for the service's tests.

A byte-level BPE tokenizer trained on the spot, special tokens, a chat template, no weights.
"""

from __future__ import annotations

import json
import pathlib

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CONTEXT = 512
BOS, EOS, START, END = 0, 1, 2, 3
SPECIAL = ["<bos>", "<eos>", "<|start|>", "<|end|>"]
_CORPUS = [
    "the quick brown fox jumps over the lazy dog and the river runs to the sea",
    "a token is a piece of text; a block holds sixteen tokens of keys and values",
    "größer schöner übermut naïve café 東京 日本語 emoji 🙂🙃 done",
] * 20
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('a system message must come first') }}{% "
    "endif %}"
    "<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_model_folder(folder: pathlib.Path, template: str | None = TEMPLATE) -> pathlib.Path:
    """Writes the folder and returns its path."""
    folder.mkdir(parents=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        # Wider than the tokenizer, as padded models are.
        "vocab_size": tokenizer.get_vocab_size() + 16,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.5, "top_p": 0.9, "eos_token_id": [EOS, END]})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def add_token(folder: pathlib.Path, text: str) -> int:
    """Gives the folder's tokenizer one more token, and returns its id."""
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_tokens([text])
    tokenizer.save(path)
    return int(tokenizer.token_to_id(text))


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return tokenizer
