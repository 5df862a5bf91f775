"""Copies small tensors between host and device without making the host wait sooner than it must."""

from __future__ import annotations

from collections.abc import Callable

import torch

IsWritten = Callable[[], bool]
"""Whether the device has written the results of the launched work. Can be called from any thread."""


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device. The copy goes through pinned memory: from pageable memory, torch would wait until the
    device has finished all its work. torch keeps the pinned memory until the copy is done."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class DeviceEvent:
    """A CUDA event on the current stream: once reached, all work launched before the event is done."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def is_done(self) -> bool:
        """Whether the event is reached. Raises RuntimeError if the device failed before. Any thread may call this."""
        done: bool = self._event.query()  # type: ignore[no-untyped-call]
        return done

    def wait(self) -> None:
        """Blocks until the event is reached."""
        self._event.synchronize()


class ToHost:
    """An asynchronous copy from a device to the host."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._launched: DeviceEvent | None = None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._launched = DeviceEvent()

    def wait(self) -> torch.Tensor:
        """Blocks until the copy is done, then returns the values."""
        if self._launched is not None:
            self._launched.wait()
        return self._values
