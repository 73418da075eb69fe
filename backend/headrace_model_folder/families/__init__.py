"""Model families: one file each, from the fields of config.json to a `ModelDescription`.

`registry` looks families up by the name that config.json's `architectures` or a GGUF file states;
`family` says what a family is; `decoder` holds what most of them share. Those with experts are in
`mixtures`.
"""
