"""The RPCs of inference.GRPCInferenceService, a file for each kind."""
