"""Inside a vLLM server: a way for published weights folders into the running model.

The driver puts the folder above on the server's PYTHONPATH, where vLLM finds the plugin by its entry point, in each of
its processes. It runs in vLLM's interpreter, so it imports nothing of ours.
"""

BACKEND = "openforge"


def register() -> None:
    """May be called more than once in a process."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "openforge_vllm.folders", "FolderTransfer")
