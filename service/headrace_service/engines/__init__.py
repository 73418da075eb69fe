"""The engines that this service reaches: connections, the models they serve, and which of them a request goes to."""
