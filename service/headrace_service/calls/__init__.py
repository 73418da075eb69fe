"""What a handler knows of its call, what a failure means for it, and both frames around handlers.

The boundary to grpc, and the call that many generations share.
"""
