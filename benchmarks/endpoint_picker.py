"""An endpoint picker before pods: it tells Envoy by ext_proc where each call goes.

It decides as llm-d's does: once it has the whole request, by a header, and gives back every part of
a body that it is sent. What it picks is its owner's to say. For tests, and as a process of its own
for `bench_envoy`, where it always picks the same:

    python -m benchmarks.endpoint_picker PORT HOST:PORT
"""

from __future__ import annotations

import asyncio
import functools
import pathlib
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc  # type: ignore[import-untyped]

DESTINATION = "x-gateway-destination-endpoint"
_PROTO = pathlib.Path(__file__).with_name("ext_proc.proto")
_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


@functools.cache
def _messages() -> dict[str, Any]:
    """The message classes of ext_proc.proto, in a pool of their own."""
    with tempfile.TemporaryDirectory() as folder:
        described = pathlib.Path(folder) / "ext_proc.binpb"
        arguments = [f"-I{_PROTO.parent}", f"--descriptor_set_out={described}", _PROTO.name]
        assert protoc.main(["protoc", *arguments]) == 0
        (file,) = descriptor_pb2.FileDescriptorSet.FromString(described.read_bytes()).file
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    messages = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(described) for name, described in messages.items()}


class EndpointPicker:
    """A picker that listens on 127.0.0.1.

    Attributes:
        pick: returns HOST:PORT for a call of a path, such as "/headrace.v1.InferenceService/Chat".
        kinds: what Envoy sent, by the names of the fields of ProcessingRequest.
        address: where it listens.
    """

    def __init__(self, pick: Callable[[str], str]) -> None:
        self.pick = pick
        self.kinds: set[str] = set()
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> None:
        """Begins to listen; on a port that the system chooses if it is 0."""
        messages = _messages()
        handler = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=messages["ProcessingRequest"].FromString,
            response_serializer=messages["ProcessingResponse"].SerializeToString,
        )
        generic = grpc.method_handlers_generic_handler(_SERVICE, {"Process": handler})
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((generic,))
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{bound}"
        await self._server.start()

    async def stop(self) -> None:
        """Ends it, and the calls that it works on."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def _process(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        response, path, body = _messages()["ProcessingResponse"], "", b""
        async for request in requests:
            kind = request.WhichOneof("request")
            self.kinds.add(kind)
            part = getattr(request, kind)
            if kind == "request_headers":
                path = _header(part.headers, ":path")
            elif kind == "request_body":
                body += part.body
                if part.end_of_stream:
                    yield response(request_headers={"response": self._picked(path)})
                    yield response(request_body={"response": _body(body, True)})
            elif kind == "response_body":
                yield response(response_body={"response": _body(part.body, part.end_of_stream)})
            else:
                yield response(**{kind: {}})

    def _picked(self, path: str) -> dict[str, Any]:
        header = {"key": DESTINATION, "raw_value": self.pick(path).encode()}
        return {"header_mutation": {"set_headers": [{"header": header}]}, "clear_route_cache": True}


def _body(data: bytes, ends: bool) -> dict[str, Any]:
    return {"body_mutation": {"streamed_response": {"body": data, "end_of_stream": ends}}}


def _header(headers: Any, name: str) -> str:
    return next(str(header.raw_value, "utf-8") for header in headers.headers if header.key == name)


async def _run(port: int, destination: str) -> None:
    picker = EndpointPicker(lambda path: destination)
    await picker.start(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_run(int(sys.argv[1]), sys.argv[2]))
