"""The gRPC front end: text in, engine requests out; token ids in, text out.

Owns everything that knows about text (validation of what callers send, tokenizer, chat template,
incremental detokenizer) and everything that knows about callers' connections (streams, deadlines,
cancellation, health). Owns no request that must survive its reader: those live in the backend,
behind `engine.proto`. Imports no torch.

A request's way in, room by room:

    api           inference_service, generation_handlers (kserve: tensors instead)
    calls         rpc_boundary: a Call, parsed; one status ends it
    generations   generations, engine_request
    engines       served_models, engine_set, routing/, engine_client -> [engine.proto]

A token's way back:

    engines       [engine.proto] -> engine_client, step_dealing
    streams       generation_stream, output_text (text: detokenizer)
    api           event_wire; streams: delivery -> client

Other ways in and out join at `generations` and at `streams.wires`: sessions, and KServe.
"""
