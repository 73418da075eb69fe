"""Families of mixtures of experts: Qwen3-MoE, Mixtral, GLM-4.5, gpt-oss, and what they share."""
