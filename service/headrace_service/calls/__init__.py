"""What a handler knows of its call, and the boundary between grpc and the handlers."""
