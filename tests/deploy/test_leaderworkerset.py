"""The manifest of a server over several machines: its pods are nodes that fit one another, and reach one another."""

from __future__ import annotations

from typing import Any

from quire.cli.flags import parse_config
from quire.foundation.config import Config
from quire.planning.rank_checks import check_nodes
from quire.serving.api.auth import PUBLIC
from tests.deploy.manifests import KUBERNETES, documents, manifests, of_kind

RESOURCES = documents((KUBERNETES / "leaderworkerset.yaml").read_text())
GROUP = of_kind(RESOURCES, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
HEAD, NODE = GROUP["leaderTemplate"], GROUP["workerTemplate"]


def container(template: dict[str, Any]) -> dict[str, Any]:
    (found,) = template["spec"]["containers"]
    return dict(found)


def config_of(template: dict[str, Any], worker: int) -> Config:
    """As it is with what LeaderWorkerSet puts into the environment."""
    names = {"$(LWS_LEADER_ADDRESS)": "quire-nodes-0.quire-nodes.default", "$(LWS_WORKER_INDEX)": str(worker)}
    return parse_config([names.get(word, word) for word in container(template)["args"]], "quire serve", "")


def test_all_pods_of_a_group_are_nodes_of_one_engine() -> None:
    head = config_of(HEAD, 0)
    assert head.parallel.nnodes == GROUP["size"]
    for worker in range(GROUP["size"]):
        own = config_of(NODE, worker) if worker else head
        check_nodes(own)
        assert own.parallel.node_rank == worker
        assert own.server.headless == bool(worker)
        assert (own.model, own.device) == (head.model, head.device)
        assert own.parallel.master_addr == head.parallel.master_addr
        assert own.parallel.ranks == head.parallel.ranks
    assert head.server.port == container(HEAD)["ports"][0]["containerPort"]


def test_a_pod_that_is_lost_does_not_take_the_others_with_it() -> None:
    """LeaderWorkerSet's other policy ends the whole group, and with it all open requests."""
    assert GROUP["restartPolicy"] == "None"
    server = config_of(HEAD, 0).server
    grace = HEAD["spec"]["terminationGracePeriodSeconds"]
    assert grace >= server.shutdown_delay + server.shutdown_timeout + 10


def test_nodes_have_the_key_and_only_the_head_is_asked_for_its_health() -> None:
    for template in (HEAD, NODE):
        secrets = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in container(template)["env"]}
        assert secrets["QUIRE_NODE_KEY"] == {"name": "quire", "key": "node-key"}
    probes = ("startupProbe", "readinessProbe", "livenessProbe")
    assert {container(HEAD)[probe]["httpGet"]["path"] for probe in probes} <= PUBLIC
    assert not any(probe in container(NODE) for probe in probes)


def test_clients_reach_the_head_and_nodes_each_other_at_any_port() -> None:
    labels = [template["metadata"]["labels"] for template in (HEAD, NODE)]
    selector = of_kind(RESOURCES, "Service")["spec"]["selector"]
    assert [selector.items() <= each.items() for each in labels] == [True, False]
    policy = of_kind(RESOURCES, "NetworkPolicy")["spec"]
    selected = policy["podSelector"]["matchLabels"]
    assert all(selected.items() <= each.items() for each in labels)
    assert {"from": [{"podSelector": {"matchLabels": selected}}]} in policy["ingress"]
    assert {"to": [{"podSelector": {"matchLabels": selected}}]} in policy["egress"]
    others = of_kind(manifests(), "Service")["spec"]["selector"]
    assert not any(others.items() <= each.items() for each in labels), "the single servers' Service would send to nodes"


def test_containers_are_as_those_of_a_single_server() -> None:
    single = of_kind(manifests(), "Deployment")["spec"]["template"]["spec"]
    (server,) = single["containers"]
    for template in (HEAD, NODE):
        assert template["spec"]["securityContext"] == single["securityContext"]
        assert template["spec"]["volumes"] == single["volumes"]
        assert container(template)["securityContext"] == server["securityContext"]
        assert container(template)["volumeMounts"] == server["volumeMounts"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container(HEAD)[probe] == server[probe]
