"""What dockerd changes in the network and leaves behind: read before it starts, put back after it has stopped."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.services.debian import PATH

FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
ENVIRONMENT = os.environ | {"PATH": PATH}


@dataclass(frozen=True)
class Network:
    """What dockerd changes in the network and leaves behind: forwarding, rules of iptables, the link docker0."""

    forward: str
    rules: str
    had_bridge: bool

    @classmethod
    def now(cls) -> Network:
        """Read the present state of this network namespace."""
        rules = "".join(_iptables_save(table) for table in ("filter", "nat"))
        return cls(FORWARD.read_text(), rules, _has_bridge())

    def to_json(self) -> str:
        """Return it as a file can hold it, for a process that ends what another one started."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> Network:
        """Read what :meth:`to_json` wrote."""
        return cls(**json.loads(text))

    def restore(self) -> None:
        """Put the state back."""
        if _has_bridge() and not self.had_bridge:
            subprocess.run(["ip", "link", "delete", "docker0"], env=ENVIRONMENT, check=False, capture_output=True)
        if self.rules:
            subprocess.run(["iptables-restore"], input=self.rules, text=True, env=ENVIRONMENT, check=True)
        FORWARD.write_text(self.forward)


def _has_bridge() -> bool:
    # Not /sys/class/net: in a new network namespace it still shows the old one's links.
    return any(line.strip().startswith("docker0:") for line in Path("/proc/net/dev").read_text().splitlines())


def _iptables_save(table: str) -> str:
    done = subprocess.run(["iptables-save", "-t", table], env=ENVIRONMENT, capture_output=True, text=True)
    # Without the comments, which hold the time, two equal states are equal texts.
    return "".join(f"{line}\n" for line in done.stdout.splitlines() if not line.startswith("#"))
