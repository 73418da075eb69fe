"""The KServe v2 / Triton wire (protos/inference), in a descriptor pool of its own."""
