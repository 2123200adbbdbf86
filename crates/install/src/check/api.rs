//! Checks of the cluster itself: clocks and DNS.

use std::{
    collections::BTreeSet,
    time::{Duration, SystemTime},
};

use anyhow::Context as _;
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{Node, Service},
};
use kube::{Api, ResourceExt as _, api::ListParams, client::Body};

use super::{Found, list, named, ready_endpoints};
use crate::connection::{Connection, readable};

/// Difference of clocks at which certificates and tokens may not be valid yet.
const MAX_SKEW: Duration = Duration::from_secs(60);
/// Namespace of the Leases that kubelets renew every 10 s.
const NODE_LEASES: &str = "kube-node-lease";
/// Namespace and name of the Service of the cluster's DNS, whatever serves it.
const DNS: (&str, &str) = ("kube-system", "kube-dns");

/// Compares the clocks of this machine and of the nodes with that of the API server.
pub(super) async fn clocks(connection: &Connection) -> anyhow::Result<Found> {
    let server = server_time(connection).await?;
    let remedy =
        "synchronise the clocks, for example with NTP: certificates and tokens are valid for a period";
    let own = difference(server, SystemTime::now());
    if own > MAX_SKEW {
        let detail = format!("this machine and the API server differ by {} s", own.as_secs());
        return Ok(Found::failed(detail, remedy));
    }
    let nodes: Api<Node> = Api::all(connection.client());
    let ready: BTreeSet<String> = list(&nodes, ListParams::default())
        .await?
        .iter()
        .filter(|node| is_ready(node))
        .map(Node::name_any)
        .collect();
    let leases: Api<Lease> = Api::namespaced(connection.client(), NODE_LEASES);
    let mut wrong = Vec::new();
    for lease in list(&leases, ListParams::default()).await? {
        let name = lease.name_any();
        let renewed = lease.spec.and_then(|spec| spec.renew_time);
        let Some(renewed) = renewed.map(|time| SystemTime::from(time.0)).filter(|_| ready.contains(&name))
        else {
            continue;
        };
        let skew = difference(server, renewed);
        if skew > MAX_SKEW {
            wrong.push(format!("{name} ({} s)", skew.as_secs()));
        }
    }
    if !wrong.is_empty() {
        let detail = format!("nodes differ from the API server by more than {MAX_SKEW:?}: {}", named(&wrong));
        return Ok(Found::failed(detail, remedy));
    }
    Ok(Found::passed(format!("this machine, the API server and {} nodes", ready.len())))
}

fn difference(one: SystemTime, other: SystemTime) -> Duration {
    one.duration_since(other).unwrap_or_else(|earlier| earlier.duration())
}

/// Returns the time of the API server, in whole seconds.
async fn server_time(connection: &Connection) -> anyhow::Result<SystemTime> {
    let request = http::Request::get("/version").body(Body::empty())?;
    let response = connection.client().send(request).await.map_err(readable)?;
    let date = response.headers().get(http::header::DATE).context("the API server sends no date")?;
    Ok(httpdate::parse_http_date(date.to_str()?)?)
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Checks that the DNS of the cluster can answer.
pub(super) async fn dns(connection: &Connection) -> anyhow::Result<Found> {
    let (namespace, name) = DNS;
    let api: Api<Service> = Api::namespaced(connection.client(), namespace);
    if api.get_opt(name).await.map_err(readable)?.is_none() {
        return Ok(Found::skipped(format!("there is no Service {namespace}/{name}")));
    }
    Ok(match ready_endpoints(connection, namespace, name).await? {
        0 => Found::failed(
            format!("no pod of Service {namespace}/{name} is ready"),
            "sidecars do not find their control plane without DNS; see the pods of this Service",
        ),
        count => Found::passed(format!("{count}")),
    })
}
