"""Models: torch modules made from a `ModelDescription`, and loading.

    ModelBuild -> CausalLM (empty) -> load_model -> CausalLM with its weights

What differs between families is in the description (`headrace_model_folder.families`); nothing here
knows a family.
"""
