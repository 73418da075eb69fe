"""KServe's own gRPC client against the address given.

test_programs runs it in an environment that has it.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest


def tensor(name: str, values: np.ndarray, datatype: str, raw: bool = True) -> InferInput:
    given = InferInput(name=name, shape=list(values.shape), datatype=datatype)
    given.set_data_from_numpy(values, binary_data=raw)
    return given


async def main(address: str) -> None:
    client = InferenceGRPCClient(url=address)
    assert await client.is_server_live() and await client.is_server_ready() and await client.is_model_ready("demo")
    inputs = [
        tensor("INPUT0", np.arange(16, dtype=np.int32).reshape(1, 16), "INT32"),
        tensor("INPUT1", np.ones((1, 16), dtype=np.int32), "INT32"),
    ]
    response = await client.infer(InferRequest(model_name="simple", infer_inputs=inputs))
    assert response.outputs[0].as_numpy().tolist() == [list(range(1, 17))]
    prompt = tensor("text_input", np.array([b"hello"], dtype=object), "BYTES")
    response = await client.infer(
        InferRequest(model_name="demo", infer_inputs=[prompt], parameters={"max_tokens": 8, "temperature": "0"})
    )
    (text,) = response.outputs[0].as_numpy().tolist()
    assert text.startswith(b"hello") and len(text) > len(b"hello")
    await client.close()
    print("PASS: kserve")


asyncio.run(main(sys.argv[1]))
