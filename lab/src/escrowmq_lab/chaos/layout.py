"""The layout of a run: folder, addresses and ports of each node, unchanged by restarts."""

from __future__ import annotations

from pathlib import Path

from escrowmq_lab.chaos.application import ApplicationPlan
from escrowmq_lab.chaos.fleet import Plan
from escrowmq_lab.chaos.modes import mode_of
from escrowmq_lab.chaos.nodes import BrokerPlan, ProgramPlan
from escrowmq_lab.chaos.options import Options
from escrowmq_lab.chaos.ports import address_of, free_ports
from escrowmq_lab.chaos.proxy import Route


def plans_of(options: Options, folder: Path, urls: dict[str, str]) -> dict[str, Plan]:
    """Return the configuration of each node, the same for every start."""
    brokers = [name for name in options.nodes if name.startswith("broker")]
    programs = [f"program-{mode}" for mode in options.modes if mode_of(mode).beside(folder, "") is not None]
    hosts = {name: address_of(place) for place, name in enumerate([*urls, *programs])}
    ports = free_ports(["127.0.0.1", *hosts.values()], len(brokers))
    plans: dict[str, Plan] = {
        name: BrokerPlan(name, folder / name, port) for name, port in zip(brokers, ports, strict=True)
    }
    found = {name: "escrow://" + ",".join(f"{host}:{port}" for port in ports) for name, host in hosts.items()}
    rate = options.rate / options.producers / len(options.modes)
    for name in programs:
        command = mode_of(name.removeprefix("program-")).beside(folder, found[name])
        assert command is not None
        plans[name] = ProgramPlan(name, folder / name, hosts[name], tuple(command))
    for name, database in urls.items():
        kind, _, number = name.rpartition("-")
        plans[name] = ApplicationPlan(
            name,
            kind,
            int(number),
            folder / name,
            database,
            hosts[name],
            found[name],
            options.modes,
            options.consumers,
            rate,
            f"{options.seed} {name}",
        )
    return plans


def routes_of(plans: dict[str, Plan]) -> list[Route]:
    """Return the routes from every producer and consumer to every broker."""
    nodes = [(plan.name, plan.host) for plan in plans.values() if isinstance(plan, ApplicationPlan | ProgramPlan)]
    brokers = [plan for plan in plans.values() if isinstance(plan, BrokerPlan)]
    return [Route(name, host, broker.name, broker.port) for name, host in nodes for broker in brokers]
