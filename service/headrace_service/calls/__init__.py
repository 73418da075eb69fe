"""What a handler knows of its call, what a failure means for it, and both frames around handlers:
the boundary to grpc, and the call that many generations share.
"""
