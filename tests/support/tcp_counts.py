"""What sockets were given to send, by the kernel's count (Linux)."""

import socket
import struct

from tfdp.hosts.host_link import CHANNELS

# Of the kernel's `struct tcp_info` (include/uapi/linux/tcp.h).
NOT_SENT, BYTES_SENT = 144, 200


def handed_to_tcp(link):
    """The bytes that the connections of all channels were given to send."""
    channels = [link._channels[channel] for channel in CHANNELS]
    return sum(
        _handed_to(each.sender._connection)
        for channel in channels
        for each in channel.neighbours
    )


def _handed_to(connection):
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    (waiting,) = struct.unpack_from("I", info, NOT_SENT)
    # The first counts what was sent a second time, too, which the second is.
    sent, again = struct.unpack_from("QQ", info, BYTES_SENT)
    return sent - again + waiting
