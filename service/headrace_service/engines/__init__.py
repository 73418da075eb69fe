"""The engines that this service reaches, and the choice of one for each request.

The room owns the connections and the models that the engines serve.
"""
