"""The engines that this service reaches: connections, the models that they serve, and the choice of
one for each request.
"""
