"""What goes wrong with a cluster or a deployment, known to those who do without Ray too."""


class DeploymentError(Exception):
    """The cluster or the deployment is not as it was asked; the message is one sentence."""
