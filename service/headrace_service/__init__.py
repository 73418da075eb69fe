"""The gRPC front end: text in, engine requests out; token ids in, text out.

Owns everything that knows about text (validation of what callers send, tokenizer, chat template,
incremental detokenizer) and everything that knows about callers' connections (streams, deadlines,
cancellation, health). Owns no request that must survive its reader: those live in the backend,
behind `engine.proto`. Imports no torch.

A request's way in:  inference_service -> rpc_boundary -> generation_handlers -> validation ->
generations -> engine_request -> engine_client -> [engine.proto] A token's way back:  [engine.proto]
-> engine_client -> step_dealing -> generation_stream -> output_text (detokenizer) -> event_wire ->
delivery -> client

Other ways in and out join at `generations` and at `wires`: session, and kserve.
"""
