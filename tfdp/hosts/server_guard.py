"""Restricts TensorFlow's server, which has no authentication, to the workers."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence

from absl import logging

from tfdp.hosts.host_link import HostLink
from tfdp.hosts.messages import read_as

CONNECT_SECONDS = 5.0
SETTINGS = "addresses of the workers"
# An address for each worker, or the reason why a port stays open.
MOST_BYTES = 64 << 20


def keep_to_workers(link: HostLink, ports: Sequence[int]) -> bool:
    """Drops connections to this process's server from machines without a worker.

    Workers exchange their source addresses, set filters, then test them by connecting.
    If one cannot connect (an address is translated on its path), all filters are
    removed, a warning is logged, and the result is false. `ports` are those of the
    workers' servers, by rank; all must listen. A collective call.

    Cost: four small gathers, and one connection to each other worker.
    """
    addresses = zip(link.hosts, ports, strict=True)
    sources = [_source(host, port) for host, port in addresses]
    blobs = link.gather(json.dumps(sources).encode(), SETTINGS, most_bytes=MOST_BYTES)
    problem = _close(ports[link.rank], _senders(link, blobs))
    link.gather(b"", SETTINGS, most_bytes=0)  # barrier: every filter is set
    others = [rank for rank in range(link.workers) if rank != link.rank]
    if not problem:
        unreached = [r for r in others if not _reaches(link.hosts[r], ports[r])]
        if unreached:
            problem = f"worker {link.rank} did not reach workers {unreached}"
    blobs = link.gather(problem.encode(), SETTINGS, most_bytes=MOST_BYTES)
    first = next(filter(None, (blob.decode(errors="replace") for blob in blobs)), "")
    if first:
        with contextlib.suppress(OSError), listeners_on(ports[link.rank]) as listeners:
            for listener in listeners:
                admit_all(listener)
        logging.warning(
            f"tfdp: Anyone who reaches port {ports[link.rank]} of this machine can "
            f"read and write files by TensorFlow's server ({first}). Let only the "
            "workers reach it, by a firewall; see docs/security.md."
        )
    link.gather(b"", SETTINGS, most_bytes=0)  # barrier: filters are gone if necessary
    return not first


def _source(host: str, port: int) -> str:
    try:
        return source_address(host, port)
    except OSError:
        return ""


def _senders(link: HostLink, blobs: Sequence[bytes]) -> list[str]:
    """Workers' source addresses: those they report, and those this worker dials."""
    senders = {"127.0.0.1", "::1"}
    for rank, (host, blob) in enumerate(zip(link.hosts, blobs, strict=True)):
        source = read_as(
            lambda blob: str(json.loads(bytes(blob))[link.rank]), blob, rank, "list"
        )
        senders |= {host, source}
    return sorted(senders - {""})


def _close(port: int, senders: Iterable[str]) -> str:
    """Restricts the port to `senders`; returns why that failed, or ""."""
    try:
        with listeners_on(port) as listeners:
            for listener in listeners:
                admit_only(listener, senders)
            return "" if listeners else f"nothing listens on port {port}"
    except (OSError, ValueError) as error:
        return f"no filter: {error}"


def _reaches(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


# A packet filter for a server that has no authentication and listens everywhere: a
# classic BPF program (Linux, `man 7 socket`, SO_ATTACH_FILTER) checks each packet's
# sender before TCP does. It needs no privileges.

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
# BPF operations, from linux/bpf_common.h.
LOAD_WORD, LOAD_BYTE, AND = 0x20, 0x30, 0x54
JUMP, JUMP_IF_EQUAL, RETURN = 0x05, 0x15, 0x06
INSTRUCTION = struct.Struct("=HBBI")
PROGRAM = struct.Struct("HP")
ADMIT, DROP = 0xFFFFFFFF, 0
# Offset of the IP header; TCP's is at 0.
HEADER = 0xFFF00000
IPV4_SENDER, IPV6_SENDER = HEADER + 12, HEADER + 8
VERSION_4, VERSION_6 = 0x40, 0x60

# (operation, jump if true, jump if false, operand)
Instruction = tuple[int, int, int, int]


@contextlib.contextmanager
def listeners_on(port: int) -> Iterator[list[socket.socket]]:
    """The listening sockets of this process with that port, from any library."""
    found = []
    seen = set()  # a socket duplicated here gets another number in that folder
    try:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile, or no socket
                facts = os.stat(int(name))
                if not stat.S_ISSOCK(facts.st_mode) or facts.st_ino in seen:
                    continue
                seen.add(facts.st_ino)
                candidate = socket.socket(fileno=os.dup(int(name)))
                if _listens_on(candidate, port):
                    found.append(candidate)
                else:
                    candidate.close()
        yield found
    finally:
        for each in found:
            each.close()


def _listens_on(candidate: socket.socket, port: int) -> bool:
    if candidate.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if not candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    return bool(candidate.getsockname()[1] == port)


def admit_only(listener: socket.socket, senders: Iterable[str]) -> None:
    """Attaches a filter to `listener`: only these IP addresses can connect.

    Raises OSError if the kernel has no filters, or for more than hundreds of addresses.
    """
    instructions = filter_program(senders)
    code = b"".join(INSTRUCTION.pack(*each) for each in instructions)
    memory = ctypes.create_string_buffer(code, len(code))
    program = PROGRAM.pack(len(instructions), ctypes.addressof(memory))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def admit_all(listener: socket.socket) -> None:
    """Removes the filter of `admit_only`."""
    listener.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def filter_program(senders: Iterable[str]) -> list[Instruction]:
    """The BPF program that admits packets from these addresses."""
    addresses = {ipaddress.ip_address(sender.partition("%")[0]) for sender in senders}
    version_4: list[Instruction] = [(LOAD_WORD, 0, 0, IPV4_SENDER)]
    version_6: list[Instruction] = []
    for address in sorted(addresses, key=str):
        words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
        if address.version == 4:
            version_4.append((JUMP_IF_EQUAL, 0, 1, words[0]))
            version_4.append((RETURN, 0, 0, ADMIT))
            continue
        for place, word in enumerate(words):
            version_6.append((LOAD_WORD, 0, 0, IPV6_SENDER + 4 * place))
            # Skip this address: two instructions per word left, and the RETURN.
            version_6.append((JUMP_IF_EQUAL, 0, 2 * (3 - place) + 1, word))
        version_6.append((RETURN, 0, 0, ADMIT))
    drop = (RETURN, 0, 0, DROP)
    return [
        (LOAD_BYTE, 0, 0, HEADER),
        (AND, 0, 0, 0xF0),
        (JUMP_IF_EQUAL, 0, 1, VERSION_6),
        (JUMP, 0, 0, len(version_4) + 3),
        (JUMP_IF_EQUAL, 1, 0, VERSION_4),
        *(drop, *version_4, drop, *version_6, drop),
    ]


def source_address(host: str, port: int) -> str:
    """The local address used to reach `host`; OSError if there is no route."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])
