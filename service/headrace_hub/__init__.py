"""Models by name: ORG/NAME of a model hub becomes a folder or a GGUF file on this machine.

    command (headrace pull) ─────────────┐
    resolve ─asks a process─> __main__ ──┴─> models ─┬─> hub: commit, files and hashes
                                                     ├─> choice: which files are the model
                                                     └─> blobs ─> cache: bytes, resumed and hashed

Owns which names may be fetched, which files are, and what a user reads of it. The protocol, the
token, the layout of the cache and its folder are huggingface_hub's, so that whatever other programs
have fetched is found here, and the other way round. Knows no model: whether a folder can be served
is `headrace_model_folder`'s question. Imports nothing of ours.
"""
