"""Outputs of a given form: what a request asks for, compiled, and the tokens that it allows.

    headrace_request.StructuredOutput
        -> compiler     a cache, and threads of its own
             -> trial   a process that compiles it first, within limits, and may be killed
             -> forms   JSON Schema, regular expression, choice, Lark, tags -> llguidance's grammar
        -> CompiledGrammar, which each output follows (`output_place`)
        -> reasoning_place  behind the output's section of reasoning, if it has one
        -> mask_pool    threads that compute the masks of a step while the workers compute its pass

llguidance does the parsing, and nothing outside of this room knows it. Of ours the room knows the
interfaces of the engine, whose thread never waits for it. Without torch.
"""
