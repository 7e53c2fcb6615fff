"""An OpenAI-compatible endpoint that somebody else serves: what it is called, whether it answers, its answers."""

from openforge.endpoint.client import Address, BadEndpoint, Endpoint, EndpointBroken, EndpointError, EndpointRefused

__all__ = ["Address", "BadEndpoint", "Endpoint", "EndpointBroken", "EndpointError", "EndpointRefused"]
