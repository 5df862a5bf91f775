"""Small numbers on their way to a device and back, without making the host wait for it sooner than it must."""

from __future__ import annotations

from collections.abc import Callable

import torch

IsWritten = Callable[[], bool]
"""Whether the device has written what was launched; from any thread."""


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device. From ordinary memory torch waits until all work of the device is done; from pinned memory
    it does not, and keeps that memory until the copy is over."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class DeviceEvent:
    """A place in the device's work: everything launched before it is computed once it is reached."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def is_done(self) -> bool:
        """Whether it is reached. Raises RuntimeError if the device failed on the way. From any thread."""
        done: bool = self._event.query()  # type: ignore[no-untyped-call]
        return done

    def wait(self) -> None:
        """Until it is reached."""
        self._event.synchronize()


class ToHost:
    """A copy on its way from a device to the host."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._launched: DeviceEvent | None = None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._launched = DeviceEvent()

    def wait(self) -> torch.Tensor:
        """The values, once they are there."""
        if self._launched is not None:
            self._launched.wait()
        return self._values
