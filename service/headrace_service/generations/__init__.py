"""From what a caller asks for to a stream that brings it, whatever the wire."""
