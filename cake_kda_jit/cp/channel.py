"""What a rank can do with the others of its group, whatever carries it: exchange tensors, and agree on values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from ..errors import PlanMismatchError


class Exchange(ABC):
    """An exchange under way. It keeps what it sends and receives alive."""

    @abstractmethod
    def wait(self) -> None:
        """Return when what is launched from now on finds the receives filled.

        Raises CommunicationError if a peer fails or is late; where a device's stream waits and not the host, the next
        exchanges or ``Channel.settle`` do.
        """


class Channel(ABC):
    """One rank's end of a group. ``received_bytes`` and ``num_exchanges`` count what it has been asked to receive."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.received_bytes = 0
        self.num_exchanges = 0

    def start(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], label: str) -> Exchange:
        """Start an exchange: contiguous tensors to and from each peer, none of them this rank's own.

        ``label`` names the exchange alike on all its ranks and is used once; messages of other labels never meet. What
        is received may be read when it is over; what is sent must not be changed at all, for a peer may take it later.
        """
        sends = {peer: tensor for peer, tensor in sends.items() if tensor.numel()}
        receives = {peer: tensor for peer, tensor in receives.items() if tensor.numel()}
        self.received_bytes += sum(tensor.nbytes for tensor in receives.values())
        self.num_exchanges += 1
        return self._start(sends, receives, label)

    def agree(self, topic: str, fields: Mapping[str, str]) -> int:
        """Raise the same PlanMismatchError on all ranks unless all give the same fields. Collective, on the host.

        Returns the agreement's number among those of the topic, which is the same on all ranks. Raises
        CommunicationError on all ranks if one of them does not take part in time.
        """
        number, disagreement = self._judge(topic, dict(fields))
        if disagreement is not None:
            raise PlanMismatchError(f"{topic}: {disagreement}; give all ranks the same")
        return number

    def settle(self) -> None:  # noqa: B027 - most channels have nothing to wait for
        """Let the host wait for all exchanges that have been waited for; raises CommunicationError as they do."""

    @abstractmethod
    def prepare(self, device: torch.device) -> None:
        """Make tensors of a device ready to be exchanged. Collective, once per device."""

    @abstractmethod
    def _start(self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor], label: str) -> Exchange: ...

    @abstractmethod
    def _judge(self, topic: str, fields: dict[str, str]) -> tuple[int, str | None]:
        """The agreement's number, and what ``find_disagreement`` says of all ranks' fields."""
