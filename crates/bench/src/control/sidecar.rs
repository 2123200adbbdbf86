//! Subscriptions and acknowledgements of one sidecar, without IO.
//!
//! With the whole mesh it subscribes in Envoy's order: clusters, endpoints, listeners, routes, virtual hosts. Each step
//! begins after the previous one has arrived. Later it subscribes to the endpoints of each new cluster, and unsubscribes
//! from those of removed clusters (in the incremental form only). On demand it subscribes at once, by name, to the services that its
//! workload uses.
//!
//! The gateways of a large mesh follow the sidecars by number. They always subscribe to the whole mesh.

use std::collections::HashSet;

use super::{
    mesh::{self, large},
    message::{Ask, Field, Form, Kind, Response, at, names, object, put, unsubscribed},
};

/// User agent of an Envoy. As an Envoy, a sidecar with the whole mesh applies one response before it reads the next.
const ENVOY: &[u8] = b"envoy";

/// Subscription of the sidecars.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Subscription {
    /// All resources, like Envoy.
    Mesh,
    /// The services that the workload uses, by name.
    Used,
}

/// Settings that all sidecars share.
pub(crate) struct Plan {
    pub(crate) form: Form,
    pub(crate) subscription: Subscription,
    /// Number of sidecars. Higher numbers are those of gateways.
    pub(crate) sidecars: usize,
    /// The mesh is large: some workloads have a Sidecar.
    pub(crate) is_large: bool,
    /// Gateways subscribe to secrets.
    pub(crate) has_secrets: bool,
    pub(crate) services: usize,
    pub(crate) namespaces: usize,
    /// Number of services that each workload uses, on demand.
    pub(crate) used: usize,
    /// Virtual hosts are sent one by one, not within their route configuration.
    pub(crate) uses_vhds: bool,
    /// Encoded names of all endpoints and routes, after the first sidecar has learnt them.
    pub(crate) endpoint_names: Vec<u8>,
    pub(crate) route_names: Vec<u8>,
    /// The same names of endpoints, one by one.
    pub(crate) first_endpoints: HashSet<Vec<u8>>,
}

impl Plan {
    /// Returns the index of the namespace of a sidecar or gateway. The last namespace is that of gateways.
    pub(crate) fn namespace(&self, number: usize) -> usize {
        if number < self.sidecars { number % self.services % self.namespaces } else { self.namespaces }
    }
}

/// Set of the types of which a first response has arrived.
type Kinds = u8;

/// State of a sidecar.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sidecar {
    pub(crate) number: usize,
    come: Kinds,
}

impl Sidecar {
    pub(crate) fn new(number: usize) -> Self {
        Self { number, come: 0 }
    }

    /// Returns true if a response of each type has arrived.
    pub(crate) fn is_configured(self, plan: &Plan) -> bool {
        self.kinds(plan).iter().all(|kind| self.come & 1 << *kind as u8 != 0)
    }

    /// Writes the first requests.
    pub(crate) fn begin(self, plan: &Plan, out: &mut Vec<u8>) {
        let node = self.node(plan);
        let mut node = node.as_slice();
        let kinds = match self.subscription(plan) {
            Subscription::Mesh => &self.kinds(plan)[..1],
            Subscription::Used => self.kinds(plan),
        };
        let secrets = (plan.has_secrets && self.gateway(plan).is_some()).then_some(&Kind::Secret);
        for kind in kinds.iter().chain(secrets) {
            Ask { form: plan.form, kind: *kind, node, nonce: b"", names: &self.names(plan, *kind) }.put(out);
            node = b"";
        }
    }

    /// Returns the types to which it subscribes, in this order, without secrets.
    fn kinds(self, plan: &Plan) -> &'static [Kind] {
        let takes_hosts = plan.uses_vhds && self.gateway(plan).is_none();
        if takes_hosts { &Kind::ALL } else { &Kind::ALL[..4] }
    }

    fn subscription(self, plan: &Plan) -> Subscription {
        if self.gateway(plan).is_some() { Subscription::Mesh } else { plan.subscription }
    }

    /// Returns the number of the gateway; `None` for a sidecar.
    pub(crate) fn gateway(self, plan: &Plan) -> Option<usize> {
        self.number.checked_sub(plan.sidecars)
    }

    /// Returns whether a Sidecar object restricts its workload.
    pub(crate) fn is_restricted(self, plan: &Plan) -> bool {
        plan.is_large && self.gateway(plan).is_none() && large::has_sidecar(self.service(plan))
    }

    /// Writes the requests that follow a response.
    pub(crate) fn answer(
        &mut self,
        plan: &Plan,
        response: &Response,
        out: &mut Vec<u8>,
    ) -> anyhow::Result<()> {
        let Some(kind) = response.kind else { return Ok(()) };
        let bit = 1 << kind as u8;
        let is_first = self.come & bit == 0;
        self.come |= bit;
        let named = if plan.form == Form::Sotw { self.names(plan, kind) } else { Vec::new() };
        Ask { form: plan.form, kind, node: b"", nonce: &response.nonce, names: &named }.put(out);
        if is_first
            && self.subscription(plan) == Subscription::Mesh
            && let kinds = self.kinds(plan)
            && let Some(at) = kinds.iter().position(|known| *known == kind)
            && let Some(next) = kinds.get(at + 1)
        {
            Ask { form: plan.form, kind: *next, node: b"", nonce: b"", names: &self.names(plan, *next) }
                .put(out);
        }
        if kind == Kind::Cluster && !is_first && self.subscription(plan) == Subscription::Mesh {
            follow_clusters(plan, response, out)?;
        }
        Ok(())
    }

    /// Returns true if it receives the resources of a service: it subscribes to them, and its Sidecar allows them.
    pub(crate) fn sees(self, plan: &Plan, service: usize) -> bool {
        let is_used =
            || self.subscription(plan) == Subscription::Mesh || self.used(plan).any(|other| other == service);
        let is_allowed = || {
            !self.is_restricted(plan)
                || large::allowed(self.service(plan), plan.services).any(|other| other == service)
        };
        is_used() && is_allowed()
    }

    /// Returns true if its workload belongs to this service.
    pub(crate) fn is_of(self, plan: &Plan, service: usize) -> bool {
        self.gateway(plan).is_none() && self.service(plan) == service
    }

    /// Returns its own service.
    fn service(self, plan: &Plan) -> usize {
        self.number % plan.services
    }

    /// Returns the services that its workload uses: its own, and those that follow it by number.
    fn used(self, plan: &Plan) -> impl Iterator<Item = usize> {
        let (own, all) = (self.service(plan), plan.services);
        (0..plan.used.min(all)).map(move |next| (own + next) % all)
    }

    fn names(self, plan: &Plan, kind: Kind) -> Vec<u8> {
        if self.gateway(plan).is_some() {
            return match kind {
                Kind::Endpoint => clusters(plan, 0..plan.services),
                Kind::Route => names(["http.80"]),
                Kind::Secret => names([format!("kubernetes://{}", mesh::SECRET).as_str()]),
                Kind::Cluster | Kind::Listener | Kind::VirtualHost => Vec::new(),
            };
        }
        match (plan.subscription, kind) {
            (Subscription::Mesh, Kind::Endpoint) if self.is_restricted(plan) => {
                clusters(plan, large::allowed(self.service(plan), plan.services))
            }
            (Subscription::Mesh, Kind::Cluster | Kind::Listener) => Vec::new(),
            (Subscription::Mesh, Kind::Endpoint) => plan.endpoint_names.clone(),
            (Subscription::Mesh, Kind::Route | Kind::VirtualHost) => plan.route_names.clone(),
            (Subscription::Used, Kind::Cluster | Kind::Endpoint) => clusters(plan, self.used(plan)),
            (Subscription::Used, Kind::Listener) => {
                names(["virtualInbound", "virtualOutbound", "0.0.0.0_80"])
            }
            (Subscription::Used, Kind::Route) => names(["80"]),
            (Subscription::Used, Kind::VirtualHost) => {
                let hosts: Vec<String> = self
                    .used(plan)
                    .map(|service| format!("80/{}:80", mesh::host(service, plan.namespaces)))
                    .collect();
                names(hosts.iter().map(String::as_str))
            }
            (_, Kind::Secret) => Vec::new(),
        }
    }

    /// Encodes the node, `envoy.config.core.v3.Node`.
    pub(super) fn node(self, plan: &Plan) -> Vec<u8> {
        if let Some(gateway) = self.gateway(plan) {
            return node_of_gateway(gateway);
        }
        let service = self.service(plan);
        let (app, namespace) = (format!("svc-{service}"), mesh::namespace(service, plan.namespaces));
        let pod = self.number / plan.services;
        let address = mesh::address(service, pod).to_string();
        let labels = object(&[("app", Field::Text(&app)), ("version", Field::Text("v1"))]);
        let metadata = object(&[
            ("CLUSTER_ID", Field::Text("Kubernetes")),
            ("INSTANCE_IPS", Field::Text(&address)),
            ("LABELS", Field::Object(labels)),
            ("MESH_ID", Field::Text("cluster.local")),
            ("NAMESPACE", Field::Text(&namespace)),
            ("SERVICE_ACCOUNT", Field::Text("default")),
            ("SKYSAIL_RESOLVED", Field::Text("true")),
            ("SKYSAIL_VHDS", Field::Text(if plan.uses_vhds { "true" } else { "false" })),
            ("WORKLOAD_NAME", Field::Text(&app)),
        ]);
        let mut node = Vec::new();
        let id = format!("sidecar~{address}~{app}-{pod}.{namespace}~{namespace}.svc.cluster.local");
        put(&mut node, 1, id.as_bytes());
        put(&mut node, 2, format!("{app}.{namespace}").as_bytes());
        put(&mut node, 3, &metadata);
        if self.subscription(plan) == Subscription::Mesh {
            put(&mut node, 6, ENVOY);
        }
        node
    }
}

/// Writes the request for the endpoints of clusters that a change has added or removed.
fn follow_clusters(plan: &Plan, response: &Response, out: &mut Vec<u8>) -> anyhow::Result<()> {
    let mut changed = Vec::new();
    for resource in &response.kept {
        // Resource.resource, Any.value, Cluster.eds_cluster_config, service_name.
        changed.extend(at(resource, &[2, 2, 3, 2])?);
    }
    changed.retain(|name| !plan.first_endpoints.contains(*name));
    let removed = response.kept_removed.iter().map(Vec::as_slice);
    let mut fields = names(changed.into_iter().filter_map(|name| str::from_utf8(name).ok()));
    fields.extend(unsubscribed(removed.filter(|name| !plan.first_endpoints.contains(*name))));
    if !fields.is_empty() && plan.form == Form::Delta {
        Ask { form: plan.form, kind: Kind::Endpoint, node: b"", nonce: b"", names: &fields }.put(out);
    }
    Ok(())
}

/// Encodes the names of the clusters of services.
fn clusters(plan: &Plan, services: impl Iterator<Item = usize>) -> Vec<u8> {
    let clusters: Vec<String> =
        services.map(|service| format!("outbound|80||{}", mesh::host(service, plan.namespaces))).collect();
    names(clusters.iter().map(String::as_str))
}

/// Encodes the node of a gateway.
fn node_of_gateway(gateway: usize) -> Vec<u8> {
    let (address, label) = (large::gateway_address(gateway).to_string(), large::gateway_label(gateway));
    let labels = object(&[("istio", Field::Text(&label))]);
    let metadata = object(&[
        ("CLUSTER_ID", Field::Text("Kubernetes")),
        ("INSTANCE_IPS", Field::Text(&address)),
        ("LABELS", Field::Object(labels)),
        ("MESH_ID", Field::Text("cluster.local")),
        ("NAMESPACE", Field::Text(large::EDGE)),
        ("SERVICE_ACCOUNT", Field::Text("default")),
        ("SKYSAIL_RESOLVED", Field::Text("true")),
        ("WORKLOAD_NAME", Field::Text(&label)),
    ]);
    let (mut node, edge) = (Vec::new(), large::EDGE);
    let id = format!("router~{address}~{}.{edge}~{edge}.svc.cluster.local", large::gateway_pod(gateway));
    put(&mut node, 1, id.as_bytes());
    put(&mut node, 2, format!("{label}.{edge}").as_bytes());
    put(&mut node, 3, &metadata);
    put(&mut node, 6, ENVOY);
    node
}
