"""When all ranks of a worker have written a layer, as its rank 0 can tell. Pure: no torch, no IO."""

from common.engine.contract.executor import LayerHook


class OneBehind:
    """When rank 0 has written a layer, all have written the one before: they met to sum its attention."""

    def __init__(self, layer_hook: LayerHook) -> None:
        self._layer_hook = layer_hook
        self._num_layers = 0

    def __call__(self, num_layers: int) -> None:
        if self._num_layers:
            self._layer_hook(self._num_layers)
        self._num_layers = num_layers

    def end(self) -> None:
        """All have ended the step."""
        if self._num_layers:
            self._layer_hook(self._num_layers)
