"""The gRPC front end: text in, engine requests out; token ids in, text out.

Owns everything that knows about text (validation of what callers send, tokenizer, chat template, incremental detokenizer) and everything that
knows about callers' connections (streams, deadlines, cancellation, health). Owns no request that must survive its reader: those live in the
backend, behind `engine.proto`. Imports no torch.

A request's way in:  inference_service -> validation -> text_model -> engine_request -> engine_client -> [engine.proto]
A token's way back:  [engine.proto] -> engine_client -> generation_stream -> detokenizer -> event_wire -> client
"""
