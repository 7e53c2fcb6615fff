"""Driver `kubernetes`: a pod for each sandbox, by the official client."""

from openforge.sandbox.kubernetes.driver import KubernetesDriver

__all__ = ["KubernetesDriver"]
